// Joins and leaves in a simulator: workers join at any time, some under one name, call each other, leave and die. Messages of a
// pair stay in order, calls do not. COHORT_SEEDS: how many programs.
#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/text/format_list.h"
#include "cohort/rpc/internal/agent/member_protocol.h"
#include "tests/rpc/protocol_simulation.h"

namespace cohort::rpc {
namespace {

// A worker as another one sees it.
class SeenMember : public net::Peer {
 public:
  SeenMember(std::int32_t id, std::string name)
      : id(id), name_(std::move(name)), incarnation_(std::to_string(id)) {}
  const std::string& name() const override { return name_; }
  const std::string& incarnation() const override { return incarnation_; }
  void send(net::Message) override {}
  std::string transport() const override { return "nothing"; }
  net::PeerMetrics metrics() const override { return {}; }
  bool is_down() const override { return is_seen_dead; }
  void poll_until(const std::function<bool()>&) override {}

  const std::int32_t id;
  bool is_seen_dead = false;

 private:
  const std::string name_, incarnation_;
};

class MemberSimulation : test::ProtocolSimulation {
 public:
  explicit MemberSimulation(std::uint64_t seed) : ProtocolSimulation(seed), num_workers_(2 + pick(5)) {}

  // Returns what does not hold, or "".
  std::string run() {
    for (std::uint64_t i = 0; i < num_workers_; ++i) at(pick(60), [this] { begin(); });
    drain([this] { check_names(); });
    for (const auto& worker : workers_) {
      if (worker->is_running() && !worker->has_joined) fail(worker->text() + " never joins");
      if (worker->is_running() && worker->is_leaving) fail(worker->text() + " never leaves");
      num_joined += worker->has_joined ? 1 : 0;
      num_left += worker->has_left ? 1 : 0;
      num_rejected += worker->is_rejected_by_name ? 1 : 0;
    }
    return error();
  }

  int num_joined = 0, num_left = 0, num_rejected = 0;

 private:
  using Seen = std::shared_ptr<SeenMember>;
  struct Worker {
    Worker(std::int32_t id, std::string name) : id(id), name(std::move(name)), table(id) {}
    bool is_running() const { return !is_dead && !has_left; }
    std::string text() const { return base::concat("worker ", id, " (", name, ')'); }

    const std::int32_t id;
    const std::string name;
    WorkerTable table;
    ShutdownState shutdown;
    MemberProtocol protocol{table, shutdown};
    std::map<std::int32_t, Seen> seen;
    std::int32_t next_to_ask = -1;
    MemberProtocol::Messages ready;
    bool has_word = false, has_joined = false, is_rejected_by_name = false, is_leaving = false,
         has_left = false, is_dead = false;
  };

  Worker& worker(std::int32_t id) { return *workers_.at(static_cast<std::size_t>(id)); }
  const Seen& see(Worker& from, std::int32_t id) {
    Seen& seen = from.seen[id];
    if (seen == nullptr) seen = std::make_shared<SeenMember>(id, worker(id).name);
    return seen;
  }

  void send(Worker& from, const MemberProtocol::Messages& messages) {
    for (const auto& [peer, message] : messages) {
      const std::int32_t to = std::static_pointer_cast<SeenMember>(peer)->id;
      on_the_way_[{from.id, to}].push_back(message);
      at(1 + pick(10), [this, &from, to] { deliver(from, to); });
    }
  }
  void deliver(Worker& from, std::int32_t to) {
    std::deque<MemberMessage>& messages = on_the_way_[{from.id, to}];
    MemberMessage message = std::move(messages.front());
    messages.pop_front();
    Worker& receiver = worker(to);
    if (!receiver.is_running()) return;
    send(receiver, receiver.protocol.on_message(see(receiver, from.id), std::move(message)));
  }

  void begin() {
    const auto id = static_cast<std::int32_t>(workers_.size());
    workers_.push_back(std::make_unique<Worker>(id, std::string(1, static_cast<char>('a' + pick(4)))));
    Worker& worker = *workers_.back();
    KnownWorker self;
    self.info = {worker.name, id};
    worker.protocol.begin(std::move(self), "ticket");
    worker.next_to_ask = id - 1;
    at(pick(8), [this, &worker] {
      if (worker.is_dead) return;
      worker.has_word = true;
      at(pick(3), [this, &worker] {
        if (!worker.is_dead) send(worker, worker.protocol.claim_id());
        ask_next(worker);
      });
    });
    if (pick(4) == 0) at(pick(150), [this, &worker] { die(worker); });
  }
  void ask_next(Worker& worker) {
    if (worker.is_dead) return;
    if (worker.next_to_ask < 0) return become_ready(worker);
    Worker& other = this->worker(worker.next_to_ask);
    if (!other.has_word && other.is_running()) return at(3, [this, &worker] { ask_next(worker); });
    if (!other.is_running() || worker.protocol.is_told_gone(other.id)) return skip(worker);
    KnownWorker known;
    known.info = {other.name, other.id};
    known.peer = see(worker, other.id);
    send(worker, worker.protocol.ask(known, "ticket"));
    look_for_answer(worker);
  }
  void skip(Worker& worker) {
    worker.protocol.add_gone(worker.next_to_ask, this->worker(worker.next_to_ask).name, "gone");
    --worker.next_to_ask;
    ask_next(worker);
  }
  void look_for_answer(Worker& worker) {
    if (worker.is_dead) return;
    const Seen peer = see(worker, worker.next_to_ask);
    const MemberMessage* const answer = worker.protocol.answer_of(peer);
    if (answer == nullptr) {
      if (!peer->is_down()) return at(2, [this, &worker] { look_for_answer(worker); });
      worker.protocol.forget(peer);
      return skip(worker);
    }
    if (answer->type == MemberMessageType::kAccepted) {
      --worker.next_to_ask;
      return ask_next(worker);
    }
    if (answer->why.empty()) return fail(worker.text() + " is taken for a stranger");
    if (!this->worker(answer->id).is_running()) return at(3, [this, &worker] { ask_next(worker); });
    worker.is_rejected_by_name = true;
    die(worker);
  }
  void become_ready(Worker& worker) {
    worker.ready = worker.protocol.become_ready();
    send(worker, worker.ready);
    look_for_end(worker);
  }
  void look_for_end(Worker& worker) {
    if (worker.is_dead) return;
    for (const auto& [peer, message] : worker.ready) {
      if (!worker.protocol.is_known_by(peer) && !peer->is_down()) {
        return at(2, [this, &worker] { look_for_end(worker); });
      }
    }
    worker.has_joined = true;
    for (const auto& other : workers_) {
      if (other->id == worker.id || !other->has_joined || !other->is_running()) continue;
      if (!lists(*other, worker) && !worker.is_leaving)
        fail(other->text() + " does not list " + worker.text());
      if (!lists(worker, *other) && !other->is_leaving)
        fail(worker.text() + " does not list " + other->text());
    }
    for (std::uint64_t i = pick(8); i > 0; --i) at(pick(60), [this, &worker] { call(worker); });
    if (pick(3) == 0) at(pick(60), [this, &worker] { begin_leaving(worker); });
  }
  static bool lists(const Worker& worker, const Worker& other) {
    for (const WorkerInfo& info : worker.table.infos()) {
      if (info.id == other.id) return true;
    }
    return false;
  }

  void call(Worker& worker) {
    if (!worker.is_running()) return;
    const std::vector<WorkerInfo> listed = worker.table.infos();
    if (listed.empty()) return;
    const std::int32_t to = listed[pick(listed.size())].id;
    if (to == worker.id) return;
    worker.shutdown.count_sent(to);
    at(1 + pick(40), [this, &worker, to] {
      Worker& callee = this->worker(to);
      if (callee.has_left && worker.is_running())
        fail("a call of " + worker.text() + " comes after " + callee.text() + " has left");
      if (callee.is_running()) callee.shutdown.count_received(worker.id);
    });
  }
  void begin_leaving(Worker& worker) {
    if (!worker.is_running()) return;
    worker.is_leaving = true;
    send(worker, worker.protocol.begin_leaving());
    look_whether_to_leave(worker);
  }
  void look_whether_to_leave(Worker& worker) {
    if (!worker.is_running()) return;
    if (worker.protocol.may_leave() != worker.protocol.describe_missing().empty())
      fail("nobody says what is missing");
    if (!worker.protocol.may_leave()) {
      return at(2, [this, &worker] { look_whether_to_leave(worker); });
    }
    worker.has_left = true;
    tell_end(worker);
  }
  void die(Worker& worker) {
    if (!worker.is_running()) return;
    worker.is_dead = true;
    tell_end(worker);
  }
  void tell_end(Worker& gone) {
    for (const auto& other : workers_) {
      if (other->id != gone.id) at(pick(30), [this, &gone, &other = *other] { see_end(other, gone); });
    }
  }
  // After all that it had sent.
  void see_end(Worker& other, Worker& gone) {
    if (!on_the_way_[{gone.id, other.id}].empty()) {
      return at(2, [this, &gone, &other] { see_end(other, gone); });
    }
    const Seen seen = see(other, gone.id);
    seen->is_seen_dead = true;
    other.table.on_down(seen, "gone");
  }

  void check_names() {
    std::map<std::string, std::int32_t> names;
    for (const auto& worker : workers_) {
      if (!worker->is_running() || !worker->has_joined) continue;
      if (!names.emplace(worker->name, worker->id).second)
        fail("two workers run under the name " + worker->name);
    }
  }

  const std::uint64_t num_workers_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::map<std::pair<std::int32_t, std::int32_t>, std::deque<MemberMessage>> on_the_way_;
};

TEST(MemberProtocolTest, NoPeerThatIsGoneIsKept) {
  WorkerTable table(1);
  ShutdownState shutdown;
  MemberProtocol protocol(table, shutdown);
  KnownWorker self, other;
  self.info = {"w1", 1};
  protocol.begin(self, "ticket");
  protocol.claim_id();
  const std::shared_ptr<net::Peer> peer = std::make_shared<SeenMember>(0, "w0");
  other.info = {"w0", 0};
  other.peer = peer;
  protocol.ask(std::exchange(other, {}), "ticket");
  MemberMessage accepted;
  accepted.type = MemberMessageType::kAccepted;
  protocol.on_message(peer, accepted);
  ASSERT_TRUE(table.is_worker(peer));
  protocol.become_ready();
  table.on_down(peer, "w0 died");
  EXPECT_EQ(peer.use_count(), 1);
}

TEST(MemberSimulationTest, WorkersJoinUnderNamesOfTheirOwnAndNoCallIsLost) {
  int num_joined = 0, num_left = 0, num_rejected = 0;
  for (std::uint64_t seed = 1; seed <= test::num_seeds(); ++seed) {
    MemberSimulation simulation(seed);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    num_joined += simulation.num_joined;
    num_left += simulation.num_left;
    num_rejected += simulation.num_rejected;
  }
  const auto num_programs = static_cast<int>(test::num_seeds());
  EXPECT_GT(num_joined, num_programs / 2);
  EXPECT_GT(num_left, num_programs / 20);
  EXPECT_GT(num_rejected, num_programs / 20);
}

}  // namespace
}  // namespace cohort::rpc

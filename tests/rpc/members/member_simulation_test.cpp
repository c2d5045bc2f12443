// Joins and leaves in a simulator: workers join at any time, some under one name, call each other, leave and
// die, with or without their hosts. Some are stopped in the middle of a join. Some cannot reach another one
// that runs, or two lose each other. Messages of a pair stay in order, calls do not. COHORT_SEEDS: how many
// programs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/text/format_list.h"
#include "cohort/rpc/internal/agent/member_protocol.h"
#include "tests/rpc/protocol/protocol_simulation.h"

namespace cohort::rpc {
namespace {

constexpr std::uint64_t kSilence = 40;
constexpr int kMaxJoins = 4;  // of one process, until its deadline

// A worker as another one sees it.
class SeenMember : public net::Peer {
 public:
  SeenMember(std::int32_t id, std::string name)
      : id(id), name_(std::move(name)), incarnation_(std::to_string(id)) {}
  const std::string& name() const override { return name_; }
  const std::string& incarnation() const override { return incarnation_; }
  std::uint64_t send(net::Message) override { return 0; }
  bool replace(std::uint64_t, net::Message&) override { return false; }
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
    for (std::uint64_t i = 0; i < num_workers_; ++i)
      at(pick(pick(2) == 0 ? 60 : 300),
         [this] { begin(std::string(1, static_cast<char>('a' + pick(4))), 1); });
    drain([this] { check_names(); });
    for (const auto& worker : workers_) {
      if (worker->is_running() && !worker->has_joined) fail(worker->text() + " never joins");
      if (worker->is_running() && worker->is_leaving) fail(worker->text() + " never leaves");
      num_joined += worker->has_joined ? 1 : 0;
      num_left += worker->has_left ? 1 : 0;
      num_rejected += worker->is_rejected_by_name ? 1 : 0;
      num_joined_again += worker->has_joined && worker->num_joins > 1 ? 1 : 0;
    }
    return error();
  }

  int num_joined = 0, num_left = 0, num_rejected = 0, num_joined_again = 0, num_failed = 0;

 private:
  enum class Reach { kAnswers, kNobodyListens, kSilent };
  using Seen = std::shared_ptr<SeenMember>;
  struct Worker {
    Worker(std::int32_t id, std::string name, int num_joins)
        : id(id), name(std::move(name)), num_joins(num_joins), table(id) {}
    bool is_running() const { return !is_dead && !has_left; }
    std::string text() const { return base::concat("worker ", id, " (", name, ')'); }

    const std::int32_t id;
    const std::string name;
    const int num_joins;  // of its process, with this one
    WorkerTable table;
    ShutdownState shutdown;
    MemberProtocol protocol{table, shutdown};
    std::map<std::int32_t, Seen> seen;
    std::int32_t next_to_ask = -1;
    std::uint64_t num_rejections = 0;
    std::set<std::int32_t> unreached;
    std::set<std::int32_t> joined_before;  // workers that had joined when this one began
    MemberProtocol::Messages ready;
    bool has_entry = false, is_stopped = false, is_host_off = false, has_joined = false,
         is_rejected_by_name = false, is_leaving = false, has_left = false, is_dead = false;
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
    if (worker(to).is_stopped) return at(2, [this, &from, to] { deliver(from, to); });
    std::deque<MemberMessage>& messages = on_the_way_[{from.id, to}];
    MemberMessage message = std::move(messages.front());
    messages.pop_front();
    Worker& receiver = worker(to);
    if (!receiver.is_running() || is_lost(from.id, to)) return;
    send(receiver, receiver.protocol.on_message(see(receiver, from.id), std::move(message)));
  }

  // Of a step of a process that may be stopped meanwhile.
  std::uint64_t pick_time(std::uint64_t usual) {
    return pick(10) == 0 ? kSilence + pick(kSilence) : pick(usual);
  }
  void begin(const std::string& name, int num_joins) {
    const auto id = static_cast<std::int32_t>(workers_.size());
    workers_.push_back(std::make_unique<Worker>(id, name, num_joins));
    Worker& worker = *workers_.back();
    KnownWorker self;
    self.info = {worker.name, id};
    worker.protocol.begin(std::move(self), "ticket");
    worker.next_to_ask = id - 1;
    for (const auto& other : workers_) {
      if (!other->has_joined || !other->is_running()) continue;
      worker.joined_before.insert(other->id);
      if (pick(20) == 0) cut_.insert({id, other->id});
    }
    at(pick_time(8), [this, &worker] {
      if (worker.is_dead) return;
      worker.has_entry = true;
      at(pick(3), [this, &worker] { claim(worker); });
    });
    if (pick(4) == 0) at(pick(150), [this, &worker] { die(worker, pick(3) == 0); });
  }
  void claim(Worker& worker) {
    if (worker.is_dead) return;
    if (++num_claims_[worker.id] != 1) return join_again(worker);
    send(worker, worker.protocol.claim_id());
    worker.is_stopped = true;
    at(pick_time(2), [this, &worker] {
      worker.is_stopped = false;
      ask_next(worker);
    });
  }
  // As the process does that has a deadline.
  void join_again(Worker& worker) {
    die(worker);
    if (worker.num_joins == kMaxJoins) {
      ++num_failed;
    } else {
      begin(worker.name, worker.num_joins + 1);
    }
  }

  void ask_next(Worker& worker) {
    if (worker.is_dead) return;
    if (worker.next_to_ask < 0) return give_up_missing(worker);
    const std::int32_t id = worker.next_to_ask--;
    if (!may_be_gone(worker, id)) return read_entry(worker, id, kSilence);
    worker.protocol.skip(id);
    ask_next(worker);
  }
  bool may_be_gone(const Worker& worker, std::int32_t id) const {
    return worker.protocol.is_told_gone(id) || gone_.count(id) > 0;
  }
  void mark_gone(std::int32_t id) {
    const Worker& marked = worker(id);
    if (marked.has_entry && !marked.is_stopped) given_up_.insert(id);
    gone_.insert(id);
  }
  void add_gone(Worker& worker, std::int32_t id) {
    worker.protocol.add_gone(id, base::concat("worker ", id), "gone");
  }
  void read_entry(Worker& worker, std::int32_t id, std::uint64_t time_left) {
    if (worker.is_dead) return;
    if (this->worker(id).has_entry) return connect(worker, id, kSilence, false);
    if (time_left > 0)
      return at(1, [this, &worker, id, time_left] { read_entry(worker, id, time_left - 1); });
    ++num_claims_[id];
    mark_gone(id);
    add_gone(worker, id);
    ask_next(worker);
  }
  Reach reach(const Worker& from, const Worker& to) const {
    if (to.is_host_off || cut_.count({from.id, to.id}) > 0) return Reach::kSilent;
    if (!to.is_running()) return Reach::kNobodyListens;
    return to.is_stopped ? Reach::kSilent : Reach::kAnswers;
  }
  void connect(Worker& worker, std::int32_t id, std::uint64_t time_left, bool has_asked) {
    if (worker.is_dead) return;
    const Reach reached = reach(worker, this->worker(id));
    if (reached == Reach::kSilent && time_left > 0) {
      return at(1, [=, this, &worker] { connect(worker, id, time_left - 1, has_asked); });
    }
    if (reached == Reach::kNobodyListens) {
      mark_gone(id);
      add_gone(worker, id);
    } else if (reached == Reach::kSilent || has_asked) {
      worker.unreached.insert(id);
      worker.protocol.add_unreached(id, reached == Reach::kAnswers);
    } else {
      return ask(worker, id);
    }
    ask_next(worker);
  }
  void ask(Worker& worker, std::int32_t id) {
    if (worker.is_dead) return;
    KnownWorker known;
    known.info = {this->worker(id).name, id};
    known.peer = see(worker, id);
    send(worker, worker.protocol.ask(known, "ticket"));
    look_for_answer(worker, id);
  }
  void look_for_answer(Worker& worker, std::int32_t id) {
    if (worker.is_dead) return;
    const Seen peer = see(worker, id);
    const MemberMessage* const answer = worker.protocol.answer_of(peer);
    if (answer == nullptr) {
      if (!peer->is_down()) return at(2, [this, &worker, id] { look_for_answer(worker, id); });
      worker.protocol.forget(peer);
      return connect(worker, id, kSilence, true);
    }
    if (answer->type == MemberMessageType::kAccepted) return ask_next(worker);
    if (answer->why.empty()) return fail(worker.text() + " is taken for a stranger");
    const std::int32_t holder = answer->id;
    const bool is_dead = holder != id && (may_be_gone(worker, holder) ||
                                          reach(worker, this->worker(holder)) != Reach::kAnswers);
    if (is_dead && ++worker.num_rejections < 2 * kSilence)
      return at(1, [this, &worker, id] { ask(worker, id); });
    worker.is_rejected_by_name = true;
    die(worker);
  }
  void give_up_missing(Worker& worker) {
    if (const std::optional<std::int32_t> id = worker.protocol.take_heard()) {
      return read_entry(worker, *id, kSilence);
    }
    if (worker.protocol.find_unreached()) return join_again(worker);
    for (const std::int32_t id : worker.unreached) {
      if (reach(worker, this->worker(id)) == Reach::kAnswers) return join_again(worker);
    }
    for (const std::int32_t id : worker.protocol.skipped()) add_gone(worker, id);
    for (const std::int32_t id : worker.unreached) {
      mark_gone(id);
      add_gone(worker, id);
    }
    if (gone_.count(worker.id) > 0) return join_again(worker);
    become_ready(worker);
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
      if (!must_know(worker, *other)) continue;
      if (!lists(*other, worker) && !worker.is_leaving)
        fail(other->text() + " does not list " + worker.text());
      if (!lists(worker, *other) && !other->is_leaving)
        fail(worker.text() + " does not list " + other->text());
    }
    if (pick(4) == 0) at(pick(60), [this, &worker] { lose_another(worker); });
    for (std::uint64_t i = pick(8); i > 0; --i) at(pick(60), [this, &worker] { call(worker); });
    if (pick(3) == 0) at(pick(60), [this, &worker] { begin_leaving(worker); });
  }
  // Where the network lets two workers reach each other, they know each other. Else a third one that knows
  // both must have run before, and the lower one too: it has told the higher one.
  bool must_know(const Worker& a, const Worker& b) const {
    const Worker &lower = a.id < b.id ? a : b, &higher = a.id < b.id ? b : a;
    if (is_lost(a.id, b.id)) return false;
    const bool is_impaired = cut_.count({higher.id, lower.id}) > 0 || given_up_.count(lower.id) > 0 ||
                             has_lost_.count(lower.id) > 0;
    if (!is_impaired) return true;
    if (higher.joined_before.count(lower.id) == 0) return false;
    for (const auto& third : workers_) {
      if (third->id == a.id || third->id == b.id || !third->is_running() || third->is_leaving) continue;
      if (higher.joined_before.count(third->id) > 0 && lists(*third, a) && lists(*third, b)) return true;
    }
    return false;
  }
  bool is_lost(std::int32_t a, std::int32_t b) const { return lost_.count(std::minmax(a, b)) > 0; }
  // Two that run give each other up.
  void lose_another(Worker& worker) {
    Worker& other = *workers_[pick(workers_.size())];
    if (other.id == worker.id || !other.has_joined || !other.is_running() || !worker.is_running()) return;
    if (other.is_leaving || worker.is_leaving) return;
    lost_.insert(std::minmax(worker.id, other.id));
    has_lost_.insert({worker.id, other.id});
    for (const auto& [seer, seen_id] : {std::pair(&worker, other.id), std::pair(&other, worker.id)}) {
      const Seen seen = see(*seer, seen_id);
      seen->is_seen_dead = true;
      seer->table.on_down(seen, "silent");
    }
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
      if (is_lost(worker.id, to)) return;
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
  void die(Worker& worker, bool with_host = false) {
    if (!worker.is_running()) return;
    worker.is_dead = true;
    worker.is_host_off = with_host;
    tell_end(worker);
  }
  void tell_end(Worker& gone) {
    const std::uint64_t silence = gone.is_host_off ? kSilence : 0;
    for (const auto& other : workers_) {
      if (other->id != gone.id)
        at(silence + pick(30), [this, &gone, &other = *other] { see_end(other, gone); });
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
      const auto [first, is_new] = names.emplace(worker->name, worker->id);
      if (!is_new && must_know(*worker, this->worker(first->second)))
        fail("two workers run under the name " + worker->name);
    }
  }

  const std::uint64_t num_workers_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::map<std::pair<std::int32_t, std::int32_t>, std::deque<MemberMessage>> on_the_way_;
  std::set<std::pair<std::int32_t, std::int32_t>> cut_;   // the first one cannot reach the second one
  std::set<std::pair<std::int32_t, std::int32_t>> lost_;  // lower id first
  std::set<std::int32_t> has_lost_;
  std::map<std::int32_t, int> num_claims_;  // on the store
  std::set<std::int32_t> gone_;             // on the store
  std::set<std::int32_t> given_up_;         // of these: those that do not find the mark before they are ready
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
  int num_joined = 0, num_left = 0, num_rejected = 0, num_joined_again = 0, num_failed = 0;
  for (std::uint64_t seed = 1; seed <= test::num_seeds(); ++seed) {
    MemberSimulation simulation(seed);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    num_joined += simulation.num_joined;
    num_left += simulation.num_left;
    num_rejected += simulation.num_rejected;
    num_joined_again += simulation.num_joined_again;
    num_failed += simulation.num_failed;
  }
  const auto num_programs = static_cast<int>(test::num_seeds());
  EXPECT_GT(num_joined, num_programs / 2);
  EXPECT_GT(num_left, num_programs / 20);
  EXPECT_GT(num_rejected, num_programs / 20);
  EXPECT_GT(num_joined_again, num_programs / 40);
  EXPECT_LT(num_failed, num_programs / 2);
}

}  // namespace
}  // namespace cohort::rpc

#include "cohort/rpc/internal/agent/worker_table.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/internal/agent/agent_messages.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using Names = std::vector<std::string>;

// Who calls itself `name`. What is sent to it is dropped.
class NamedPeer : public net::Peer {
 public:
  NamedPeer(std::string name, std::string incarnation)
      : name_(std::move(name)), incarnation_(std::move(incarnation)) {}
  const std::string& name() const override { return name_; }
  const std::string& incarnation() const override { return incarnation_; }
  std::uint64_t send(net::Message) override { return 0; }
  bool replace(std::uint64_t, net::Message&) override { return false; }
  std::string transport() const override { return "nothing"; }
  net::PeerMetrics metrics() const override { return {}; }
  bool is_down() const override { return is_dead; }
  void poll_until(const std::function<bool()>&) override {}

  bool is_dead = false;

 private:
  const std::string name_, incarnation_;
};

std::shared_ptr<net::Peer> named_peer(const std::string& name, const std::string& incarnation) {
  return std::make_shared<NamedPeer>(name, incarnation);
}

// Workers w0, w1 ... of incarnations i0, i1 ...
std::vector<KnownWorker> known_workers(int size) {
  std::vector<KnownWorker> known(static_cast<std::size_t>(size));
  for (int id = 0; id < size; ++id) {
    KnownWorker& worker = known[static_cast<std::size_t>(id)];
    worker.info = {"w" + std::to_string(id), id};
    worker.incarnation = "i" + std::to_string(id);
  }
  return known;
}

WorkerTable table_of(std::int32_t self, int size) {
  WorkerTable table(self);
  table.set(known_workers(size));
  return table;
}

TEST(WorkerTableTest, WorkersAreFoundByNameAndId) {
  const WorkerTable table = table_of(0, 12);
  EXPECT_EQ(table.find("w10").info, (WorkerInfo{"w10", 10}));
  EXPECT_EQ(table.id_of("w2"), 2);
  EXPECT_EQ(table.name_of_target(11), "w11");
  EXPECT_EQ(table.received(3), (WorkerInfo{"w3", 3}));
  EXPECT_EQ(table.infos()[10], (WorkerInfo{"w10", 10}));  // by id, not by name
  EXPECT_EQ(table.find_if_known("w12"), nullptr);
  COHORT_EXPECT_THROW_WITH(table.find("w12"), UsageError, "there is no worker 'w12'; the workers are w0, w1");
  COHORT_EXPECT_THROW_WITH(table.name_of_target(12), UsageError,
                           "there is no worker 12; the ids are 0 to 11");
  COHORT_EXPECT_THROW_WITH(table.name_of_target(-1), UsageError, "there is no worker -1");
  COHORT_EXPECT_THROW_WITH(table.received(12), CommError, "there is no worker 12");
}

TEST(WorkerTableTest, TwoWorkersOfOneNameAreAnError) {
  WorkerTable table(0);
  std::vector<KnownWorker> known = known_workers(2);
  known[1].info.name = "w0";
  COHORT_EXPECT_THROW_WITH(table.set(std::move(known)), UsageError, "two workers are named 'w0'");
}

TEST(WorkerTableTest, TheFirstProcessOfAWorkersIncarnationIsHeardAsTheWorker) {
  WorkerTable table = table_of(1, 3);
  const auto stranger = named_peer("w2", "another"), unknown = named_peer("w9", "i9"),
             lower = named_peer("w0", "i0");
  const auto worker = named_peer("w2", "i2"), second = named_peer("w2", "i2");
  for (const auto& connected : {stranger, unknown, lower, worker, second}) table.on_connect(connected);
  EXPECT_TRUE(table.is_worker(worker));
  for (const auto& connected : {stranger, unknown, lower, second}) {
    EXPECT_FALSE(table.is_worker(connected)) << connected->name() << ' ' << connected->incarnation();
  }
}

TEST(WorkerTableTest, AProcessThatConnectsBeforeTheWorkersAreKnownIsHeardOnceTheyAre) {
  WorkerTable table(0);
  const auto stranger = named_peer("w1", "another"), worker = named_peer("w1", "i1");
  table.on_connect(stranger);
  table.on_connect(worker);
  EXPECT_FALSE(table.is_worker(worker));
  table.set(known_workers(3));
  EXPECT_TRUE(table.is_worker(worker));
  EXPECT_FALSE(table.is_worker(stranger));
  EXPECT_EQ(table.not_connected(), Names{"w2"});
}

TEST(WorkerTableTest, WorkersWithLowerIdsAreConnectedToAndThoseWithHigherOnesAreAwaited) {
  WorkerTable table = table_of(1, 3);
  EXPECT_EQ(table.not_connected(), Names{"w2"});
  COHORT_EXPECT_THROW_WITH(table.on_connected(0, named_peer("w0", "another")), RendezvousError,
                           "at the address of worker 0 is another process: w0");
  COHORT_EXPECT_THROW_WITH(table.on_connected(0, named_peer("w2", "i2")), RendezvousError,
                           "is another process: w2");
  COHORT_EXPECT_THROW_WITH(table.on_connected(0, named_peer("w9", "i9")), RendezvousError,
                           "is another process: w9");
  const auto worker = named_peer("w0", "i0");
  table.on_connected(0, worker);
  EXPECT_TRUE(table.is_worker(worker));
  table.on_connect(named_peer("w2", "i2"));
  EXPECT_EQ(table.not_connected(), Names{});
}

TEST(WorkerTableTest, TheEndOfAProcessIsThatOfTheWorkerItIsHeardAs) {
  WorkerTable table = table_of(0, 3);
  const auto worker = named_peer("w2", "i2");
  table.on_connect(worker);
  EXPECT_EQ(table.on_down(named_peer("w2", "i2"), "a stranger died"), std::nullopt);
  EXPECT_EQ(table.find("w2").down, "");
  EXPECT_EQ(table.on_down(worker, "w2 died"), 2);
  EXPECT_EQ(table.find("w2").down, "w2 died");
}

// Worker 0 of a dynamic group, ready.
WorkerTable dynamic_table() {
  WorkerTable table(0);
  table.begin_dynamic(known_workers(1)[0]);
  table.set_ready(0);
  return table;
}
void add_member(WorkerTable& table, std::int32_t id, const std::shared_ptr<net::Peer>& peer, bool is_ready) {
  KnownWorker worker;
  worker.info = {peer->name(), id};
  worker.peer = peer;
  worker.is_ready = is_ready;
  table.add(std::move(worker));
}

TEST(WorkerTableTest, ALaterWorkerOfANameIsAnotherWorker) {
  WorkerTable table = dynamic_table();
  const auto first = named_peer("ps/0", "i3"), later = named_peer("ps/0", "i5");
  add_member(table, 3, first, true);
  EXPECT_EQ(table.resolve("ps/0"), "ps/0");
  EXPECT_EQ(table.find_by_peer(first)->info.id, 3);
  EXPECT_EQ(table.on_down(first, "ps/0 died"), 3);
  EXPECT_EQ(first.use_count(), 1) << "what the peer has goes with it";
  EXPECT_EQ(table.infos(), (std::vector<WorkerInfo>{{"w0", 0}}));
  EXPECT_EQ(table.resolve("ps/0"), "ps/0") << "a call of it says that it died";
  add_member(table, 5, later, true);
  EXPECT_EQ(table.resolve("ps/0"), "ps/0#5");
  EXPECT_EQ(table.resolve("ps/0#5"), "ps/0#5");
  EXPECT_EQ(table.infos(), (std::vector<WorkerInfo>{{"w0", 0}, {"ps/0", 5}}));
  EXPECT_EQ(table.find_by_peer(first), nullptr);
  EXPECT_EQ(table.find_by_peer(later)->info.id, 5);
  EXPECT_EQ(table.on_down(later, "ps/0 left"), 5);
  EXPECT_EQ(table.gone_ids(), (std::vector<std::int32_t>{3, 5}));
  COHORT_EXPECT_THROW_WITH(table.resolve("ps/1"), UsageError,
                           "there is no worker 'ps/1'; the workers are w0");
}

TEST(WorkerTableTest, ANameOfAnotherAgentsTableIsResolvedByItsId) {
  WorkerTable table = dynamic_table();
  add_member(table, 5, named_peer("ps/0", "i5"), true);
  table.add_gone(3, "worker 3", "worker 3 was gone");
  EXPECT_EQ(table.resolve("ps/0#5"), "ps/0");
  EXPECT_EQ(table.resolve("ps/0#3"), "worker 3#3");
  for (const char* const name : {"ps/0#4", "ps/0#", "ps/0#x", "ps/0#5x", "ps/0#-1", "ps/0#99999999999"}) {
    EXPECT_THROW(table.resolve(name), UsageError) << name;
  }
}

TEST(WorkerTableTest, AWorkerThatJoinsIsListedOnceItIsReady) {
  WorkerTable table = dynamic_table();
  const auto peer = named_peer("w4", "i4");
  add_member(table, 4, peer, false);
  EXPECT_TRUE(table.is_worker(peer));
  EXPECT_EQ(table.received(4), (WorkerInfo{"w4", 4})) << "others may speak of it";
  EXPECT_THROW(table.resolve("w4"), UsageError);
  const auto other = named_peer("w2", "i2");
  add_member(table, 2, other, true);
  COHORT_EXPECT_THROW_WITH(table.name_of_target(4), UsageError, "there is no worker 4; the ids are 0, 2");
  table.on_down(other, "w2 died");
  EXPECT_EQ(table.infos().size(), 1U);
  table.set_ready(4);
  EXPECT_EQ(table.resolve("w4"), "w4");
  EXPECT_EQ(table.infos().size(), 2U);
  table.set_leaving(4, true);
  EXPECT_EQ(table.find("w4").down, "w4 is leaving");
  EXPECT_EQ(table.infos().size(), 1U);
  table.set_leaving(4, false);
  EXPECT_EQ(table.find("w4").down, "");
}

TEST(WorkerTableTest, ANameBelongsToWhoIsReadyElseToTheLowestId) {
  WorkerTable table = dynamic_table();
  const auto dead = std::make_shared<NamedPeer>("b", "i7");
  add_member(table, 5, named_peer("a", "i5"), false);
  add_member(table, 7, dead, true);
  EXPECT_EQ(table.holder_of("w0", 9), 0);
  EXPECT_EQ(table.holder_of("a", 6), 5);
  EXPECT_EQ(table.holder_of("a", 4), std::nullopt) << "worker 4 joins too, and rejects worker 5";
  EXPECT_EQ(table.holder_of("b", 4), 7);
  dead->is_dead = true;
  EXPECT_EQ(table.holder_of("b", 9), std::nullopt);
}

TEST(WorkerTableTest, AFunctionThatAWorkerLacksOrHasDifferentlyIsAnError) {
  KnownWorker worker = known_workers(1)[0];
  COHORT_EXPECT_THROW_WITH(worker.check_function(kBackwardPart), UsageError,
                           "w0 has no function rpc::backward_part: here (gradients) -> gradients, untaken");
  worker.signatures[kBackwardPart] = "(Tensor) -> Tensor";
  COHORT_EXPECT_THROW_WITH(
      worker.check_function(kBackwardPart), UsageError,
      "w0 has another function rpc::backward_part: here (gradients) -> gradients, untaken, "
      "there (Tensor) -> Tensor");
  worker.signatures[kBackwardPart] = "(gradients) -> gradients, untaken";
  EXPECT_NO_THROW(worker.check_function(kBackwardPart));
}

}  // namespace
}  // namespace cohort::rpc

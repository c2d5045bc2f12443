// What agents with a common store know of one that has ended.
#include <gtest/gtest.h>

#include <string>

#include "agent_network.h"
#include "tests/support/contains.h"

namespace cohort::membership {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::AgentNetwork;
using test::contains;
using test::run_of;
using AgentInStore = AgentNetwork::Agent;

// It has reported to nobody, as it has decided itself.
TEST(AgentDeathsTest, TheDeathOfTheOneThatDecidesIsSeenAtOnce) {
  AgentNetwork network;
  const AgentInStore& a = network.add("a", "n1:1", run_of(1, 2), "");
  const AgentInStore& b = network.add("b", "n2:1", run_of(1, 2), "");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member() && b.is_member(); }));
  network.run(seconds(1));
  ASSERT_TRUE(a.protocol.is_deciding());
  const std::uint64_t number = b.record().generation.number;
  network.kill("n1:1");
  EXPECT_TRUE(
      network.run_until(milliseconds(50), [&] { return b.record().generation.number == number + 1; }));
  EXPECT_EQ(b.record().generation.cause, "agent 1 at n1:1 died");
  EXPECT_GT(b.record().generation.detect_ms, 0U);
  EXPECT_LE(b.record().generation.detect_ms, 150U) << "it answers each report";
}

TEST(AgentDeathsTest, ARunEndsWhereItsOnlyMemberDiesThatHasDecided) {
  AgentNetwork network;
  RunSettings settings = run_of(1, 1);
  settings.num_spares = 1;
  const AgentInStore& a = network.add("a", "n1:1", settings, "");
  ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member(); }));
  const AgentInStore& spare = network.add("b", "n2:1", settings, "");
  ASSERT_TRUE(network.run_until(
      seconds(2), [&] { return spare.protocol.record() && spare.record().spares.size() == 1; }));
  network.kill("n1:1");
  network.run(seconds(3));
  EXPECT_EQ(spare.record().state, RunState::kFailed);
  EXPECT_TRUE(contains(spare.record().end_cause, "agent 1 at n1:1 died")) << spare.record().end_cause;
  EXPECT_TRUE(contains(spare.record().end_cause, "no agent is left that had the state"));
}

// "a" has made 900 steps in a generation of its own, and nobody is left that knows it. What "c" has is the
// state from before that.
TEST(AgentDeathsTest, WhoDidNotMakeTheNewestGenerationDoesNotContinueFromItsOwnSteps) {
  for (const bool is_late : {true, false}) {
    AgentNetwork network;
    AgentInStore& a = network.add("a", "n1:1", run_of(1, 2), "");
    AgentInStore& c = network.add("c", "n2:1", run_of(1, 2), "");
    ASSERT_TRUE(network.run_until(seconds(2), [&] { return a.is_member() && c.is_member(); }));
    for (AgentInStore* const agent : {&a, &c}) {
      agent->report.committed_steps = 100;
      network.report(*agent);
    }
    network.run(milliseconds(500));
    const std::uint64_t number = a.record().generation.number;
    c.is_stopped = true;  // its host is cut off
    ASSERT_TRUE(network.run_until(seconds(4), [&] { return a.record().generation.number == number + 1; }));
    ASSERT_EQ(a.record().generation.committed_steps, 100U);
    a.report.committed_steps = 1'000;
    network.report(a);
    network.tells_closed_ports = true;
    network.lose("n1:1");
    c.is_stopped = false;
    // It begins to decide, and then reads of the generation that "a" has made.
    network.is_store_away = !is_late;
    network.run(seconds(1));
    network.is_store_away = false;
    if (is_late) network.stop(milliseconds(400));  // a busy host
    network.run(seconds(14));
    EXPECT_EQ(c.record().generation.number, number + 1);
    EXPECT_EQ(c.record().state, RunState::kFailed) << c.record().end_cause;
  }
}

}  // namespace
}  // namespace cohort::membership

// What the agent that decides does about ranks that do not enter a generation.
#include <gtest/gtest.h>

#include "rendezvous.h"
#include "tests/support/contains.h"

namespace cohort::membership {
namespace {

using std::chrono::milliseconds;
using test::Rendezvous;
using StuckNames = std::vector<std::string>;

TEST(StuckRanksTest, AnAgentWithARankThatDoesNotEnterIsGivenUpUntilItDoes) {
  Rendezvous run(1, 3);
  run.form({"a", "b", "c"});
  run.hear("b", [](Report& report) {
    report.stuck = "local rank 1 has not entered it";
    report.is_ready = false;
  });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (StuckNames{"a", "c"}));
  EXPECT_FALSE(run.record.generation.is_planned);
  EXPECT_EQ(run.record.generation.cause, "agent 2 at host-b:1 is given up: local rank 1 has not entered it");
  EXPECT_EQ(run.record.generation.detect_ms, 0U) << "it was heard all the time";
  // It waits, heard by all, and comes back when the rank gets on.
  for (int i = 0; i < 20; ++i) {
    run.wait(milliseconds(100));
    run.hear("a");
    run.hear("c");
    run.hear("b", [](Report& report) {
      report.stuck = "local rank 1 has not entered it";
      report.is_ready = false;
    });
    run.step();
    EXPECT_EQ(run.members(), (StuckNames{"a", "c"}));
  }
  run.hear("b", [](Report& report) {
    report.stuck.clear();
    report.is_ready = true;
  });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (StuckNames{"a", "c", "b"}));
}

TEST(StuckRanksTest, AStateThatOnlyAStuckAgentHasIsLost) {
  Rendezvous run(1, 2);
  run.form({"a"});
  run.hear("b");
  EXPECT_TRUE(run.step());
  ASSERT_EQ(run.members(), (StuckNames{"a", "b"}));
  run.hear("b", [](Report& report) { report.recovered = 0; });
  run.hear("a", [](Report& report) {
    report.recovered = 1;
    report.stuck = "local rank 0 has not entered it";
  });
  run.step();
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_TRUE(test::contains(run.record.end_cause,
                             "is given up: local rank 0 has not entered it; no agent is "
                             "left that had the state of generation 2"))
      << run.record.end_cause;
}

}  // namespace
}  // namespace cohort::membership

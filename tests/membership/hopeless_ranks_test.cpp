// What the agent that decides does about agents whose ranks fail again and again.
#include <gtest/gtest.h>

#include "rendezvous.h"
#include "tests/support/contains.h"

namespace cohort::membership {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::contains;
using test::Rendezvous;
using HopelessNames = std::vector<std::string>;

void fail_for_good(Report& report) {
  report.failure = "rank 1 ended with status 3";
  report.exit_status = 3;
  report.ends_run = true;
}

Rendezvous run_in_etcd(int min_nodes) {
  Rendezvous run(min_nodes, 3);
  run.record.settings.is_embedded = false;
  run.record.settings.max_restarts = 100;
  run.form({"a", "b"});
  return run;
}

TEST(HopelessRanksTest, TheOthersContinueWithoutTheirAgent) {
  Rendezvous run = run_in_etcd(1);
  run.hear("b", fail_for_good);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (HopelessNames{"a"}));
  EXPECT_FALSE(run.record.generation.is_planned);
  EXPECT_EQ(run.record.restarts_used, 0);
  EXPECT_EQ(run.record.generation.cause,
            "agent 2 at host-b:1: rank 1 ended with status 3 (failed again and again, and no step was made "
            "between)");
  EXPECT_EQ(run.record.exit_status, 0);
}

// Each would leave, as the other one could continue: the record would say for ever that the run continues.
TEST(HopelessRanksTest, TheRunEndsWhereThoseOfAllMembersFailAtTheSameTime) {
  Rendezvous run = run_in_etcd(1);
  run.hear("a", fail_for_good);
  run.hear("b", fail_for_good);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(run.record.exit_status, 3);
  EXPECT_TRUE(contains(run.record.end_cause, "no member can continue, so the run can be resumed"));
  EXPECT_TRUE(
      contains(run.record.end_cause, "agent 2 at host-b:1: rank 1 ended with status 3 (failed again"));
}

// A generation without the first one would make the second one look as if it could continue.
TEST(HopelessRanksTest, ThoseThatMayBeAboutToFailTooAreWaitedFor) {
  for (const bool is_late : {false, true}) {
    Rendezvous run = run_in_etcd(2);
    run.hear("b", fail_for_good);
    run.seen.agents.at("b").hopeless_at = run.seen.now;
    EXPECT_FALSE(run.step()) << run.record.end_cause;
    run.wait(milliseconds(is_late ? 2'100 : 1'900));
    run.hear("b", fail_for_good);
    is_late ? run.hear("a") : run.hear("a", fail_for_good);
    EXPECT_TRUE(run.step());
    EXPECT_EQ(run.record.state, RunState::kFailed);
    EXPECT_EQ(run.record.exit_status, 3);
    EXPECT_EQ(contains(run.record.end_cause, "no member can continue"), !is_late) << run.record.end_cause;
  }
}

// The others would wait for a node that nobody starts, and the run would end with another status.
TEST(HopelessRanksTest, TheRunEndsWhereTooFewAreLeft) {
  for (const bool is_embedded : {false, true}) {
    Rendezvous run = run_in_etcd(2);
    run.record.settings.is_embedded = is_embedded;
    run.hear("b", fail_for_good);
    run.wait(milliseconds(2'100));
    run.hear("a");
    run.hear("b", fail_for_good);
    EXPECT_TRUE(run.step());
    EXPECT_EQ(run.record.state, RunState::kFailed);
    EXPECT_EQ(run.record.exit_status, 3);
    EXPECT_TRUE(contains(run.record.end_cause, "agent 2 at host-b:1: rank 1 ended with status 3"))
        << run.record.end_cause;
  }
}

TEST(HopelessRanksTest, WhoIsSilentMayStillMakeThemEnough) {
  Rendezvous run(2, 3);
  run.record.settings.is_embedded = false;
  run.form({"a", "b", "c"});
  run.wait(milliseconds(2'100));
  run.hear("a");
  run.hear("b", fail_for_good);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming) << run.record.end_cause;
  EXPECT_EQ(run.record.exit_status, 3);
  run.seen.agents.at("b").is_dead = true;
  run.hear("c");
  while (run.step()) {
  }
  EXPECT_EQ(run.record.state, RunState::kRunning) << run.record.end_cause;
  EXPECT_EQ(run.members(), (HopelessNames{"a", "c"}));
}

TEST(HopelessRanksTest, WhoeverIsLeftAloneWithThemEndsTheRun) {
  Rendezvous run = run_in_etcd(1);
  run.hear("b", fail_for_good);
  run.step();
  ASSERT_EQ(run.members(), (HopelessNames{"a"}));
  run.seen.agents.at("b").is_dead = true;
  run.hear("a", fail_for_good);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(run.record.exit_status, 3);
}

TEST(HopelessRanksTest, WithADeadMemberTheRunEndsToo) {
  Rendezvous run = run_in_etcd(1);
  run.seen.agents.at("b").is_dead = true;
  run.hear("a", fail_for_good);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(run.record.exit_status, 3);
}

TEST(HopelessRanksTest, ASilentMemberThatHasTheStateIsWaitedFor) {
  Rendezvous run = run_in_etcd(1);
  run.wait(seconds(3));
  run.hear("a", fail_for_good);
  EXPECT_FALSE(run.step()) << run.record.end_cause;
  run.hear("b");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (HopelessNames{"b"}));
}

TEST(HopelessRanksTest, AStateThatOnlyTheyHadIsLost) {
  Rendezvous run(1, 3);
  run.record.settings.is_embedded = false;
  run.form({"b"});
  const auto has_no_state = [](Report& report) { report.recovered = 0; };
  run.hear("a", has_no_state);
  run.step();
  ASSERT_EQ(run.members(), (HopelessNames{"b", "a"}));
  run.hear("a", has_no_state);
  run.hear("b", [](Report& report) {
    report.recovered = 1;
    fail_for_good(report);
  });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(run.record.exit_status, 3);
  EXPECT_TRUE(contains(run.record.end_cause, "no agent is left that had the state of generation 2"));
}

// "b" was dropped as its host stood still.
TEST(HopelessRanksTest, WhoMayHaveTheirStateIsWaitedFor) {
  Rendezvous run = run_in_etcd(1);
  for (const char* const agent : {"a", "b"}) run.seen.agents.at(agent).most_steps = 16;
  run.wait(milliseconds(600));
  run.hear("a");
  run.step();
  ASSERT_EQ(run.members(), (HopelessNames{"a"}));
  run.hear("c", [](Report& report) {
    report.recovered = 0;
    report.is_ready = false;
  });
  EXPECT_TRUE(run.step());
  run.hear("a", fail_for_good);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming) << run.record.end_cause;
  EXPECT_EQ(run.record.exit_status, 3);
  EXPECT_TRUE(contains(run.record.end_cause, "rank 1 ended with status 3 (failed again and again"));
  run.wait(run.settings.join_timeout + seconds(1));
  run.hear("c", [](Report& report) { report.recovered = 0; });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(run.record.exit_status, 3);
  EXPECT_TRUE(contains(run.record.end_cause, "no agent is left that had the state of generation 2"));
}

TEST(HopelessRanksTest, TooFewThatAreLeftWaitForOthers) {
  Rendezvous run = run_in_etcd(2);
  run.hear("c", [](Report& report) { report.is_ready = false; });
  EXPECT_TRUE(run.step());
  run.hear("b", fail_for_good);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming);
  ASSERT_EQ(run.record.waiting.size(), 2U);
  EXPECT_EQ(run.record.exit_status, 3);
  // They leave too, and say so. Nobody has come until their time is over.
  for (const char* const agent : {"a", "b", "c"}) {
    run.hear(agent, [](Report& report) {
      report.is_leaving = true;
      report.is_ready = false;
    });
  }
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(run.record.exit_status, 3);
  EXPECT_TRUE(contains(run.record.end_cause, "rank 1 ended with status 3 (failed again and again"));
}

TEST(HopelessRanksTest, WithAnEmbeddedRecordThoseOfTheEndpointEndTheRun) {
  Rendezvous run(1, 2);
  run.record.settings.max_restarts = 100;
  run.form({"a", "b"});
  run.hear("b", [](Report& report) { report.failure = "rank 0 was killed"; });
  run.hear("a", fail_for_good);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(run.record.exit_status, 3);
  EXPECT_EQ(run.record.restarts_used, 0);
  EXPECT_EQ(run.record.end_cause,
            "agent 1 at host-a:1: rank 1 ended with status 3 (failed again and again, and no step was made "
            "between)");
}

}  // namespace
}  // namespace cohort::membership

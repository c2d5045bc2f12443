// When an agent may go that leaves with the state.
#include <gtest/gtest.h>

#include "rendezvous.h"
#include "tests/support/contains.h"

namespace cohort::membership {
namespace {

using test::Rendezvous;
using HolderNames = std::vector<std::string>;

// Reports of the newest generation.
void give_notice(Report& report) {
  report.is_leaving = true;
}
void fail_rank(Report& report) {
  report.failure = "rank 1 was killed";
}
// Its ranks are in the generation, and have made no step there.
void begin_copy(Report& report) {
  report.recovered = 0;
}

// Agents "b" and "c" have the state in the first generation.
Rendezvous run_of_two() {
  Rendezvous run(1, 2);
  run.record.settings.is_embedded = false;
  run.record.settings.max_restarts = 9;
  run.form({"b", "c"});
  return run;
}

// A rank that is killed while it changes the state leaves none. Its agent is a holder all the same.
TEST(LeavingHoldersTest, WhoLeavesWaitsForASuccessorThatCopiesTheState) {
  Rendezvous run = run_of_two();
  run.hear("c", fail_rank);
  EXPECT_TRUE(run.step());
  ASSERT_EQ(run.members(), (HolderNames{"b", "c"}));
  const auto leave_first_generation = [](Report& report) {
    give_notice(report);
    report.recovered = 1;
  };
  run.hear("c", [](Report& report) {
    begin_copy(report);
    report.failure.clear();
  });
  run.hear("b", leave_first_generation);
  EXPECT_FALSE(run.step()) << run.record.generation.cause;
  // A generation that cannot continue has a next one, with both.
  run.hear("c", [](Report& report) {
    begin_copy(report);
    fail_rank(report);
  });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (HolderNames{"b", "c"}));
  EXPECT_FALSE(run.record.generation.is_planned);
  run.hear("b", give_notice);
  run.hear("c", [](Report& report) { report.failure.clear(); });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (HolderNames{"c"}));
  EXPECT_TRUE(run.record.generation.is_planned);
}

TEST(LeavingHoldersTest, WhoLeavesAsARankOfTheOtherOneFailsGivesItsStateFirst) {
  Rendezvous run = run_of_two();
  run.hear("c", fail_rank);
  run.hear("b", give_notice);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (HolderNames{"b", "c"}));
}

TEST(LeavingHoldersTest, WhileTheRunFormsWhoMayHaveLostTheStatePushesNobodyOut) {
  const std::vector<std::pair<const char*, void (*)(Report&)>> losses = {
      {"it has failed", fail_rank},
      {"it copies", begin_copy},
      {"its successor starts", [](Report& report) { report.is_ready = false; }},
      {"", [](Report&) {}}};
  for (const auto& [what, lose] : losses) {
    Rendezvous run(3, 3);
    run.record.settings.is_embedded = false;
    run.form({"b", "c", "d"});
    run.seen.agents.at("d").is_dead = true;
    EXPECT_TRUE(run.step());
    ASSERT_EQ(run.record.state, RunState::kForming);
    run.hear("b", give_notice);
    run.hear("c", lose);
    run.step();
    const bool has_lost = *what != 0;
    EXPECT_EQ(run.record.waiting.size(), has_lost ? 2U : 1U) << what;
    EXPECT_EQ(run.record.holders, (has_lost ? std::vector<MemberId>{1, 2} : std::vector<MemberId>{2}))
        << what;
  }
}

// Its host is gone, or its time to leave is over.
TEST(LeavingHoldersTest, WhileTheRunFormsWhoCannotGiveItsStateAnyMoreIsNotWaitedFor) {
  for (const bool is_silent : {true, false}) {
    Rendezvous run(2, 2);
    run.record.settings.is_embedded = false;
    run.form({"b", "c"});
    run.seen.agents.at("c").is_dead = true;
    EXPECT_TRUE(run.step());
    run.hear("b", give_notice);
    run.step();
    ASSERT_EQ(run.record.state, RunState::kForming);
    if (is_silent) {
      run.wait(std::chrono::milliseconds(2'100));
    } else {
      run.hear("b", [](Report& report) { report.is_ready = false; });
    }
    EXPECT_TRUE(run.step());
    EXPECT_EQ(run.record.state, RunState::kFailed);
    EXPECT_TRUE(test::contains(run.record.end_cause, "agent 2 at host-c:1 died; no agent is left that had"))
        << run.record.end_cause;
  }
}

// Nobody says of its ranks that they have begun a step.
TEST(LeavingHoldersTest, AgentsOfAProgramThatIsNotElasticLeaveAtOnce) {
  Rendezvous run(3, 3);
  run.record.settings.is_embedded = false;
  run.record.settings.virtual_ranks = 0;
  run.form({"b", "c", "d"});
  run.seen.agents.at("d").is_dead = true;
  EXPECT_TRUE(run.step());
  run.hear("b", [](Report& report) {
    give_notice(report);
    report.recovered = 0;
  });
  run.hear("c", begin_copy);
  EXPECT_TRUE(run.step());
  ASSERT_EQ(run.record.waiting.size(), 1U);
  EXPECT_EQ(run.record.waiting[0].incarnation, "c");
}

}  // namespace
}  // namespace cohort::membership

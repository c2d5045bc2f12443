// Who keeps the state of a run whose last holder leaves, or is thought to be gone.
#include "cohort/membership/internal/lost_state.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "rendezvous.h"
#include "tests/support/contains.h"

namespace cohort::membership {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using test::Rendezvous;
using Members = std::vector<std::string>;

void leave(Report& report) {
  report.is_leaving = true;
}
void lack_state(Report& report) {
  report.recovered = 0;
}

TEST(LostStateTest, ASpareGetsTheStateOfTheOnlyMemberBeforeThatOneLeaves) {
  Rendezvous run(1, 1);
  run.record.settings.is_embedded = false;
  run.record.settings.num_spares = 1;
  run.record.settings.last_call_timeout = seconds(10);
  run.form({"b"});
  run.wait(seconds(11));
  run.hear("b");
  run.step();
  run.hear("a", lack_state);
  run.step();
  ASSERT_EQ(run.members(), (Members{"b"}));
  ASSERT_EQ(run.record.spares.size(), 1U);
  run.hear("b", leave);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kRunning) << run.record.end_cause;
  EXPECT_EQ(run.members(), (Members{"b", "a"}));
  EXPECT_TRUE(run.record.generation.is_planned);
  EXPECT_EQ(parse_record(to_text(run.record)), run.record);
  run.hear("b", leave);
  run.hear("a", lack_state);
  EXPECT_FALSE(run.step()) << run.record.generation.cause;
  run.hear("a");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Members{"a"}));
  EXPECT_TRUE(run.record.generation.is_planned);
}

TEST(LostStateTest, WhereAllMembersLeaveTheyWaitForAnAgentThatIsThere) {
  Rendezvous run(1, 2);
  run.record.settings.is_embedded = false;
  run.form({"b"});
  run.hear("a", [](Report& report) { report.is_ready = false; });
  run.step();
  run.hear("b", leave);
  EXPECT_FALSE(run.step()) << run.record.end_cause;
  run.hear("a", lack_state);
  run.seen.agents.at("a").report.is_ready = true;
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Members{"b", "a"}));
}

// A generation that continues ends no copy. One that cannot continue has a next one.
TEST(LostStateTest, WhoLeavesWithTheStateIsInTheNextGenerationToo) {
  Rendezvous run(1, 3);
  run.record.settings.is_embedded = false;
  run.record.settings.max_restarts = 9;
  run.form({"b"});
  run.hear("a", lack_state);
  run.step();
  ASSERT_EQ(run.members(), (Members{"b", "a"}));
  run.hear("a", lack_state);
  run.hear("b", [](Report& report) {
    report.is_leaving = true;
    report.recovered = 1;
  });
  run.hear("c", lack_state);
  run.step();
  EXPECT_EQ(run.record.generation.number, 2U);
  run.hear("a", [](Report& report) {
    report.recovered = 0;
    report.failure = "rank 1 was killed";
  });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.generation.number, 3U);
  EXPECT_EQ(run.members(), (Members{"b", "a", "c"}));
  EXPECT_FALSE(run.record.generation.is_planned);
}

TEST(LostStateTest, WhileTheRunFormsWhoLeavesWithTheStateIsStillThere) {
  Rendezvous run(2, 2);
  run.record.settings.is_embedded = false;
  run.form({"b", "c"});
  run.seen.agents.at("c").is_dead = true;
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming);
  run.hear("b", leave);
  run.step();
  EXPECT_EQ(run.record.state, RunState::kForming) << "another one may come: " << run.record.end_cause;
  EXPECT_EQ(run.record.holders, (std::vector<MemberId>{1}));
  run.hear("a", lack_state);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kRunning) << run.record.end_cause;
  EXPECT_EQ(run.members(), (Members{"b", "a"}));
  run.hear("b", leave);
  run.hear("a");
  while (run.step()) {
  }
  EXPECT_EQ(run.record.state, RunState::kForming) << "one is too few, and has the state";
  EXPECT_EQ(run.record.holders, (std::vector<MemberId>{3}));
}

// Its host may have failed without a word.
TEST(LostStateTest, WhileTheRunFormsAHolderThatIsSilentDoesNotPushOutOneThatLeaves) {
  for (const bool is_silent : {true, false}) {
    Rendezvous run(3, 3);
    run.record.settings.is_embedded = false;
    run.form({"b", "c", "d"});
    run.seen.agents.at("d").is_dead = true;
    EXPECT_TRUE(run.step());
    ASSERT_EQ(run.record.state, RunState::kForming);
    run.wait(milliseconds(600));
    run.hear("b", leave);
    if (!is_silent) run.hear("c");
    run.hear("a", lack_state);
    run.hear("e", lack_state);
    EXPECT_TRUE(run.step());
    EXPECT_EQ(run.record.state, RunState::kRunning) << run.record.end_cause;
    EXPECT_EQ(run.members(), (is_silent ? Members{"b", "a", "e"} : Members{"c", "a", "e"}));
  }
}

TEST(LostStateTest, WhileTheRunFormsAMemberThatComesBackStillHasTheState) {
  for (const bool has_recovered : {true, false}) {
    Rendezvous run(2, 2);
    run.record.settings.is_embedded = false;
    run.form({"b", "c"});
    run.wait(milliseconds(600));
    run.hear("b", [](Report& report) { report.unheard = {2}; });
    EXPECT_TRUE(run.step());
    EXPECT_EQ(run.record.state, RunState::kForming);
    run.wait(seconds(3));  // the host of "b" has failed
    run.hear("a", lack_state);
    run.hear("c", [&](Report& report) { report.recovered = has_recovered ? 1 : 0; });
    if (!has_recovered) run.seen.agents.at("c").most_steps = 16;
    EXPECT_TRUE(run.step());
    EXPECT_EQ(run.record.state, RunState::kRunning);
    EXPECT_EQ(run.members(), (Members{"c", "a"})) << "by id: it was heard first";
  }
}

// "a" is alone in a generation, and its ranks have lost their state. "c" was dropped as its host stood still.
Rendezvous run_without_state() {
  Rendezvous run(1, 2);
  run.record.settings.is_embedded = false;
  run.form({"a", "c"});
  for (const char* const agent : {"a", "c"}) run.seen.agents.at(agent).most_steps = 16;
  run.wait(milliseconds(600));
  run.hear("a");
  run.step();
  EXPECT_EQ(run.members(), (Members{"a"}));
  run.hear("a", [](Report& report) {
    report.recovered = 1;
    report.is_state_lost = true;
  });
  return run;
}

TEST(LostStateTest, ARunWaitsForAnAgentThatMayHaveTheState) {
  Rendezvous run = run_without_state();
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming);
  EXPECT_EQ(run.record.end_cause, "no process has the state of step 16 any more");
  run.wait(seconds(3));
  run.hear("a", lack_state);
  EXPECT_FALSE(run.step());
  run.hear("c");
  while (run.step()) {
  }
  EXPECT_EQ(run.record.state, RunState::kRunning) << run.record.end_cause;
  EXPECT_EQ(run.members(), (Members{"a", "c"}));
  EXPECT_EQ(run.record.holders, (std::vector<MemberId>{3}));
  // It had lost its state too.
  run.hear("a", lack_state);
  run.hear("c", [](Report& report) {
    report.recovered = 1;
    report.is_state_lost = true;
  });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
}

TEST(LostStateTest, WhoDoesNotComeBackIsWaitedForUntilTheJoinTimeout) {
  Rendezvous run = run_without_state();
  run.step();
  run.wait(run.settings.join_timeout + seconds(1));
  run.hear("a", lack_state);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_TRUE(test::contains(run.record.end_cause,
                             "no process has the state of step 16 any more; no agent is left that had"))
      << run.record.end_cause;
}

TEST(LostStateTest, NobodyWaitsForAnAgentThatIsDeadOrHasFewerSteps) {
  for (const bool is_dead : {true, false}) {
    Rendezvous run = run_without_state();
    run.seen.agents.at("c").is_dead = is_dead;
    if (!is_dead) run.seen.agents.at("c").most_steps = 14;
    EXPECT_TRUE(run.step());
    EXPECT_EQ(run.record.state, RunState::kFailed);
  }
}

// It cannot know yet whom another one has dropped.
TEST(LostStateTest, WhoHasJustBegunToDecideWaitsForReports) {
  Rendezvous run = run_without_state();
  run.seen.agents.erase("c");
  run.begin_to_decide();
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming);
  run.wait(seconds(3));
  run.hear("a", lack_state);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
}

// Its side of a cut network has nobody that had the state.
TEST(LostStateTest, WhoHearsNobodyThatHadTheStateDoesNotEndTheRun) {
  Rendezvous run = run_without_state();
  EXPECT_TRUE(run.step());
  run.seen.agents.clear();
  run.seen.self = "d";
  for (const milliseconds time : {milliseconds(0), milliseconds(3'000)}) {
    run.wait(time);
    run.hear("d", lack_state);
    run.step();
    EXPECT_EQ(run.record.state, RunState::kForming) << run.record.end_cause;
  }
  run.wait(run.settings.join_timeout);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
}

// The one that let the run form has failed, and the next one was not there when "c" was dropped.
TEST(LostStateTest, AnotherAgentThatDecidesKnowsWhomTheRunWaitsFor) {
  for (const bool is_member_heard : {true, false}) {
    for (const bool comes_back : {true, false}) {
      Rendezvous run = run_without_state();
      EXPECT_TRUE(run.step());
      EXPECT_EQ(run.record.awaited, (std::vector<AwaitedAgent>{{"c", 16}}));
      EXPECT_EQ(parse_record(to_text(run.record)), run.record);
      const AgentView member = run.seen.agents.at("a");
      run.seen.agents.clear();
      if (is_member_heard) run.seen.agents["a"] = member;
      run.seen.self = "d";
      run.begin_to_decide();
      run.wait(seconds(3));
      run.hear("d", lack_state);
      if (is_member_heard) run.hear("a", lack_state);
      run.step();
      EXPECT_EQ(run.record.state, RunState::kForming) << run.record.end_cause;
      if (!comes_back) {
        run.wait(run.settings.join_timeout);
        run.hear("d", lack_state);
        if (is_member_heard) run.hear("a", lack_state);
        EXPECT_TRUE(run.step());
        EXPECT_EQ(run.record.state, RunState::kFailed);
        continue;
      }
      run.hear("c");
      run.seen.agents.at("c").most_steps = 16;
      while (run.step()) {
      }
      EXPECT_EQ(run.record.state, RunState::kRunning) << run.record.end_cause;
      ASSERT_EQ(run.record.holders.size(), 1U);
      EXPECT_EQ(run.record.generation.find(run.record.holders[0])->incarnation, "c");
      EXPECT_EQ(run.record.awaited.size(), 1U) << "it may have lost its state";
      for (const std::string& agent : run.members()) {
        run.hear(agent, [](Report& report) { report.is_state_lost = false; });
      }
      run.step();
      EXPECT_TRUE(run.record.awaited.empty()) << "it has not";
    }
  }
}

// Two may have the state. The one that comes back first has it no longer.
TEST(LostStateTest, WhomARunAwaitsIsKeptUntilAMemberHasTheState) {
  Rendezvous run = run_without_state();
  EXPECT_TRUE(run.step());
  run.record.awaited.push_back({"e", 16});
  run.seen.agents.clear();
  run.seen.self = "d";
  run.begin_to_decide();
  run.wait(seconds(3));
  run.hear("d", lack_state);
  run.hear("c", lack_state);
  while (run.step()) {
  }
  ASSERT_EQ(run.record.state, RunState::kRunning) << run.record.end_cause;
  EXPECT_EQ(run.record.awaited, (std::vector<AwaitedAgent>{{"c", 16}, {"e", 16}}));
  run.hear("d", lack_state);
  run.hear("c", [](Report& report) {
    report.recovered = 0;
    report.is_state_lost = true;
  });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming) << run.record.end_cause;
  EXPECT_EQ(run.record.awaited, (std::vector<AwaitedAgent>{{"e", 16}}));
}

// "c" has come back to it with the state. "e", of which these know nothing, may have it too.
Rendezvous run_that_awaits_another() {
  Rendezvous run = run_without_state();
  EXPECT_TRUE(run.step());
  run.record.awaited.push_back({"e", 16});
  run.wait(seconds(3));
  run.hear("a", lack_state);
  run.hear("c");
  while (run.step()) {
  }
  return run;
}

// An agent that knows of more steps than another one misses the state where the other one begins a step.
TEST(LostStateTest, WhomARunAwaitsIsKeptWhereOneMemberMissesTheState) {
  Rendezvous run = run_that_awaits_another();
  ASSERT_EQ(run.members(), (Members{"a", "c"})) << run.record.end_cause;
  run.hear("c");
  run.step();
  run.hear("a", [](Report& report) { report.recovered = 0; });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming) << "it says that the state is lost";
  EXPECT_EQ(std::ranges::count(run.record.awaited, std::string("e"), &AwaitedAgent::incarnation), 1);
}

// The generation may have run for long, with a member that could not enter it.
TEST(LostStateTest, TheTimeToWaitBeginsWithTheLossOfTheState) {
  Rendezvous run = run_that_awaits_another();
  ASSERT_EQ(run.members(), (Members{"a", "c"})) << run.record.end_cause;
  run.wait(run.settings.join_timeout + seconds(1));
  for (const char* const agent : {"a", "c"}) {
    run.hear(agent, [](Report& report) {
      report.recovered = 0;
      report.is_state_lost = true;
    });
  }
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming) << run.record.end_cause;
  EXPECT_EQ(run.record.awaited, (std::vector<AwaitedAgent>{{"e", 16}}));
}

// Its rank may get on, and then it has the state for whoever decides.
TEST(LostStateTest, WhoIsAwaitedMayBeStuckForAWhile) {
  Rendezvous run = run_without_state();
  run.hear("e");
  run.seen.agents.at("e").most_steps = 16;
  run.hear("c", [](Report& report) { report.stuck = "local rank 0 has not entered it"; });
  EXPECT_TRUE(run.step());
  ASSERT_EQ(run.record.state, RunState::kForming) << run.record.end_cause;
  EXPECT_EQ(run.record.awaited, (std::vector<AwaitedAgent>{{"c", 16}, {"e", 16}}));
}

TEST(LostStateTest, WhoComesBackWhileTheRunFormsIsAwaitedByAllThatDecideLater) {
  Rendezvous run = run_without_state();
  const AgentView dropped = run.seen.agents.at("c");
  run.record.settings.min_nodes = 3;
  run.seen.agents.erase("c");
  run.begin_to_decide();
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming);
  EXPECT_TRUE(run.record.awaited.empty());
  run.seen.agents["c"] = dropped;
  run.hear("c");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming);
  EXPECT_EQ(run.record.awaited, (std::vector<AwaitedAgent>{{"c", 16}}));
}

// It was dropped by the one that decided before, and this one has had no report of it.
TEST(LostStateTest, AnAgentThatIsAwaitedIsWaitedForByOneThatHasHeardNothingOfIt) {
  Rendezvous run = run_without_state();
  EXPECT_TRUE(run.step());
  run.seen.agents.clear();
  run.seen.self = "d";
  run.begin_to_decide();
  run.seen.agents["c"].last_heard = run.seen.now;
  run.seen.agents["b"].most_steps = 16;  // so it is not unknown who had the state
  run.seen.agents["b"].is_dead = true;
  run.wait(seconds(3));
  run.hear("d", lack_state);
  run.step();
  EXPECT_EQ(run.record.state, RunState::kForming) << run.record.end_cause;
}

TEST(LostStateTest, WhereTheLastHolderDiesAnAgentThatWasDroppedContinues) {
  Rendezvous run = run_without_state();
  run.seen.agents.at("a").report.is_state_lost = false;
  run.record.generation.members[0].incarnation = "b";
  run.seen.agents["b"] = run.seen.agents.at("a");
  run.seen.agents.at("b").is_dead = true;
  run.seen.agents.at("a").most_steps = 0;
  run.hear("c");
  while (run.step()) {
  }
  EXPECT_EQ(run.record.state, RunState::kRunning) << run.record.end_cause;
  EXPECT_EQ(run.record.holders.size(), 1U);
  EXPECT_TRUE(run.record.generation.find(run.record.holders[0])->incarnation == "c");
}

TEST(LostStateTest, WhileTheRunFormsTheLastFailureIsKept) {
  Rendezvous run(2, 2);
  run.record.settings.max_restarts = 9;
  run.form({"a", "b"});
  run.hear("b", [](Report& report) {
    report.failure = "rank 1 ended with status 5";
    report.exit_status = 5;
  });
  run.seen.agents.at("b").is_dead = true;
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming);
  run.wait(run.settings.join_timeout + seconds(1));
  run.hear("a");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(run.record.exit_status, 5);
  EXPECT_EQ(run.record.end_cause,
            "only 1 of at least 2 agents were there for 600000 ms; agent 2 at host-b:1: rank 1 ended with "
            "status 5; agent 2 at host-b:1 died");
}

// It was another one that dropped an agent a moment before, which may have the state.
TEST(LostStateTest, WhoHasJustBegunToDecideWaitsForReportsAlsoAfterAGenerationOfItsOwn) {
  Rendezvous run(1, 2);
  run.record.settings.is_embedded = false;
  run.form({"a", "b"});
  run.seen.decides_since = run.seen.now;
  run.wait(milliseconds(300));
  run.seen.generation_since = run.seen.now;
  run.hear("b", [](Report& report) {
    report.committed_steps = 7;
    report.is_state_lost = true;
  });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming) << run.record.end_cause;
}

}  // namespace
}  // namespace cohort::membership

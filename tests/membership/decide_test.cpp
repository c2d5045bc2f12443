#include "cohort/membership/internal/decide.h"

#include <gtest/gtest.h>

#include <tuple>

#include "rendezvous.h"
#include "tests/support/contains.h"

namespace cohort::membership {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using test::Rendezvous;
using Names = std::vector<std::string>;

TEST(DecideTest, ARunBeginsWithAtLeastMinNodes) {
  Rendezvous run(2, 3);
  run.hear("a");
  EXPECT_TRUE(run.step());
  EXPECT_FALSE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming);
  run.wait(seconds(5));
  run.hear("a");
  run.hear("b");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kRunning);
  EXPECT_EQ(run.record.generation.number, 1U);
  EXPECT_EQ(run.members(), (Names{"a", "b"}));
  EXPECT_EQ(run.record.generation.store, "store-a");
  EXPECT_EQ(run.record.generation.cause, "the run begins");
  EXPECT_FALSE(run.step());
}

TEST(DecideTest, ALastCallIsWaitedForUnlessAllPlacesAreTaken) {
  for (const bool is_full : {false, true}) {
    Rendezvous run(2, 3);
    run.record.settings.last_call_timeout = seconds(10);
    for (const char* const agent : {"a", "b"}) run.hear(agent);
    if (is_full) run.hear("c");
    run.step();
    EXPECT_EQ(run.record.state, is_full ? RunState::kRunning : RunState::kForming);
    run.wait(seconds(11));
    for (const char* const agent : {"a", "b"}) run.hear(agent);
    run.step();
    EXPECT_EQ(run.record.state, RunState::kRunning);
  }
}

TEST(DecideTest, TooFewAgentsEndTheRunAfterTheJoinTimeout) {
  Rendezvous run(2, 2);
  run.hear("a");
  run.step();
  run.wait(run.settings.join_timeout + seconds(1));
  run.hear("a");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(run.record.end_cause, "only 1 of at least 2 agents were there for 600000 ms");
}

TEST(DecideTest, ALaterAgentEntersAtOnceAndIdsStay) {
  Rendezvous run(1, 3);
  run.form({"a"});
  run.hear("b");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a", "b"}));
  EXPECT_TRUE(run.record.generation.is_planned);
  EXPECT_EQ(run.record.generation.cause, "agent 2 at host-b:1 joins");
  run.seen.agents.at("b").is_dead = true;
  run.step();
  run.hear("c");
  run.step();
  EXPECT_EQ(run.members(), (Names{"a"})) << "its ranks may be getting the state";
  run.hear("a");
  run.step();
  EXPECT_EQ(run.members(), (Names{"a", "c"}));
  EXPECT_EQ(run.record.generation.members[1].id, 3U);  // 2 is never given again
}

TEST(DecideTest, AnAgentThatIsNotReadyWaits) {
  Rendezvous run(1, 2);
  run.form({"a"});
  run.hear("b", [](Report& report) { report.is_ready = false; });
  run.step();
  EXPECT_EQ(run.record.generation.number, 1U);
  EXPECT_EQ(run.record.waiting.size(), 1U);
  run.hear("b", [](Report& report) { report.is_ready = true; });
  run.step();
  EXPECT_EQ(run.members(), (Names{"a", "b"}));
}

TEST(DecideTest, SparesTakeThePlacesOfMembersThatAreGone) {
  Rendezvous run(2, 2);
  run.record.settings.num_spares = 1;
  run.form({"a", "b"});
  run.hear("c");
  run.hear("d");
  run.step();
  EXPECT_EQ(run.record.generation.number, 1U);
  ASSERT_EQ(run.record.spares.size(), 1U);
  EXPECT_EQ(run.record.waiting.size(), 1U);
  const std::string spare = run.record.spares[0].incarnation;
  run.seen.agents.at("b").is_dead = true;
  run.step();
  EXPECT_EQ(run.members(), (Names{"a", spare}));
  EXPECT_FALSE(run.record.generation.is_planned);
  ASSERT_EQ(run.record.spares.size(), 1U);  // the next one
  EXPECT_TRUE(run.record.waiting.empty());
}

TEST(DecideTest, ASilentAgentIsGivenUpByTwoObservers) {
  Rendezvous run(1, 3);
  run.form({"a", "b", "c"});
  run.wait(milliseconds(600));
  run.hear("a");
  run.hear("b");
  EXPECT_FALSE(run.step());  // "b" has not said so
  run.hear("b", [](Report& report) { report.unheard = {3}; });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a", "b"}));
  EXPECT_EQ(run.record.generation.cause, "agent 3 at host-c:1 is silent");
  EXPECT_EQ(run.record.generation.detect_ms, 600U);
}

TEST(DecideTest, AnAgentThatOnlyAnotherMemberDoesNotHearStays) {
  Rendezvous run(1, 3);
  run.form({"a", "b", "c"});
  run.wait(seconds(5));
  for (const char* const agent : {"a", "c"}) run.hear(agent);
  run.hear("b", [](Report& report) { report.unheard = {3}; });
  EXPECT_FALSE(run.step());
}

TEST(DecideTest, OfTwoAgentsTheOneThatDecidesNeedsNoObserver) {
  Rendezvous run(1, 2);
  run.form({"a", "b"});
  run.wait(milliseconds(600));
  run.hear("a");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a"}));
}

TEST(DecideTest, AfterFourTimesTheSilenceNoObserverIsNeeded) {
  Rendezvous run(1, 3);
  run.form({"a", "b", "c"});
  for (const milliseconds time : {milliseconds(1'900), milliseconds(200)}) {
    EXPECT_FALSE(run.step());
    run.wait(time);
    for (const char* const agent : {"a", "b"}) run.hear(agent);
  }
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a", "b"}));
}

TEST(DecideTest, ThePartOfANetworkWithFewerAgentsWaitsLonger) {
  Rendezvous run(1, 5);
  run.form({"a", "b", "c", "d", "e"});
  run.wait(milliseconds(600));
  run.hear("a");
  run.hear("b", [](Report& report) { report.unheard = {3, 4, 5}; });
  EXPECT_FALSE(run.step());
  run.wait(milliseconds(1'500));
  run.hear("a");
  run.hear("b");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a", "b"}));
}

TEST(DecideTest, AnAgentThatDoesNotHearOfAGenerationIsGivenUp) {
  Rendezvous run(1, 3);
  run.form({"a", "b"});
  run.hear("c");
  run.step();
  run.wait(milliseconds(2'100));
  for (const char* const agent : {"a", "c"}) run.hear(agent);
  run.hear("b", [](Report& report) { report.known = 1; });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a", "c"}));
}

TEST(DecideTest, FailedRanksCountAsRestartsUntilTheyAreUsedUp) {
  Rendezvous run(1, 2);
  run.record.settings.max_restarts = 1;
  run.form({"a", "b"});
  const auto fail = [](Report& report) {
    report.failure = "rank 1 ended with status 3";
    report.exit_status = 3;
  };
  run.hear("b", fail);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.exit_status, 0);
  EXPECT_EQ(run.record.generation.number, 2U);
  EXPECT_EQ(run.record.restarts_used, 1);
  EXPECT_EQ(run.record.generation.cause, "agent 2 at host-b:1: rank 1 ended with status 3");
  EXPECT_FALSE(run.step());  // the report is of generation 1
  run.hear("a");
  run.hear("b", fail);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(run.record.end_cause, "agent 2 at host-b:1: rank 1 ended with status 3 (1 restarts used of 1)");
  EXPECT_EQ(run.record.exit_status, 3);
}

TEST(DecideTest, WhoLeavesByNoticeIsOutAfterAStep) {
  Rendezvous run(1, 2);
  run.form({"a", "b"});
  run.hear("b", [](Report& report) { report.is_leaving = true; });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a"}));
  EXPECT_TRUE(run.record.generation.is_planned);
  EXPECT_FALSE(run.step());  // it does not join again
}

TEST(DecideTest, TheAgentAtTheEndpointTakesTheRunWithIt) {
  Rendezvous run(1, 2);
  run.form({"a", "b"});
  run.hear("a", [](Report& report) { report.is_leaving = true; });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_TRUE(test::contains(run.record.end_cause, "host-a:1 leaves, and it has the run's only record"));
}

TEST(DecideTest, ARunEndsWhenAllHaveFinished) {
  Rendezvous run(1, 2);
  run.form({"a", "b"});
  const auto finish = [](Report& report) { report.is_finished = true; };
  run.hear("a", finish);
  EXPECT_FALSE(run.step());
  run.hear("b", finish);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kSucceeded);
  EXPECT_FALSE(run.step());
}

// Else an agent that had no part would end with status 0.
TEST(DecideTest, ARunThatASignalHasStoppedHasNotSucceeded) {
  Rendezvous run(1, 2);
  run.form({"a", "b"});
  run.hear("a", [](Report& report) { report.is_finished = true; });
  run.hear("b", [](Report& report) {
    report.is_finished = true;
    report.stop_signal = 15;
  });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kStopped);
  EXPECT_TRUE(run.record.has_ended());
  EXPECT_EQ(run.record.exit_status, 143);
  EXPECT_EQ(run.record.stop_signal(), 15);
  EXPECT_EQ(run.record.end_cause, "signal 15 (Terminated) has stopped the run");
  EXPECT_EQ(parse_record(to_text(run.record)), run.record);
  EXPECT_FALSE(run.step());
}

TEST(DecideTest, WhoHasMadeTheLastStepStaysUntilAllHave) {
  Rendezvous run(1, 3);
  run.form({"a", "b"});
  run.hear("a", [](Report& report) { report.is_finished = true; });
  run.hear("c");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.generation.number, 1U) << "nobody enters any more";
  run.seen.agents.at("b").is_dead = true;
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a"}));
  EXPECT_EQ(run.record.state, RunState::kRunning);
}

TEST(DecideTest, RanksThatHaveEndedAreInNoLaterGeneration) {
  Rendezvous run(1, 3);
  run.record.settings.virtual_ranks = 0;
  run.form({"a", "b", "c"});
  run.hear("a", [](Report& report) { report.is_finished = true; });
  run.seen.agents.at("b").is_dead = true;
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"c"}));
}

// As the node that is switched off once its part is done.
TEST(DecideTest, AnAgentWhoseRanksHaveEndedMayGo) {
  Rendezvous run(2, 2);
  run.record.settings.virtual_ranks = 0;
  run.form({"a", "b"});
  run.hear("b", [](Report& report) { report.is_finished = true; });
  run.seen.agents.at("b").is_dead = true;
  EXPECT_FALSE(run.step()) << run.record.generation.cause;
  run.wait(seconds(5));
  run.hear("a");
  EXPECT_FALSE(run.step()) << run.record.generation.cause;
  run.hear("a", [](Report& report) { report.is_finished = true; });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kSucceeded);
}

TEST(DecideTest, WhereAllSurvivorsHaveMadeTheLastStepNobodyIsMissing) {
  Rendezvous run(2, 2);
  run.form({"a", "b"});
  const auto finish = [](Report& report) { report.is_finished = true; };
  run.hear("a", finish);
  run.seen.agents.at("b").is_dead = true;
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kRunning) << run.record.end_cause;
  EXPECT_EQ(run.members(), (Names{"a"}));
  run.hear("a", finish);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kSucceeded);
}

TEST(DecideTest, AnAgentThatIsNotReadyIsNoMemberOfTheFirstGenerationEither) {
  Rendezvous run(2, 3);
  run.hear("a");
  run.hear("b");
  const auto start = [](Report& report) { report.is_ready = false; };
  run.hear("c", start);
  run.step();
  EXPECT_EQ(run.members(), (Names{"a", "b"}));
  Rendezvous few(2, 3);
  few.hear("a");
  few.hear("c", start);
  few.step();
  EXPECT_EQ(few.record.state, RunState::kForming);
  few.hear("c", [](Report& report) { report.is_ready = true; });
  few.step();
  EXPECT_EQ(few.members(), (Names{"a", "c"}));
}

// Keys of ranks that have ended would be read by those that start.
TEST(DecideTest, AProgramThatIsNotElasticGetsAnotherStoreEachTime) {
  Rendezvous run(1, 2);
  run.record.settings.virtual_ranks = 0;
  run.record.settings.max_restarts = 9;
  run.form({"a", "b"});
  EXPECT_EQ(run.record.generation.store, "store-a");
  const auto hear = [&](const char* agent, const char* store, const char* failure) {
    run.hear(agent,
             [&](Report& report) { std::tie(report.store, report.failure) = std::tuple(store, failure); });
  };
  hear("b", "store-b", "a rank failed");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.generation.store, "store-b") << "nobody else offers another one";
  hear("b", "store-b2", "");
  hear("a", "store-a2", "a rank failed");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.generation.store, "store-a2");

  // One agent alone, which is late with its offer.
  run.seen.agents.at("b").is_dead = true;
  hear("a", "store-a2", "");
  EXPECT_FALSE(run.step());
  hear("a", "store-a3", "");
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.generation.store, "store-a3");
  hear("a", "store-a3", "a rank failed");
  EXPECT_FALSE(run.step());
  EXPECT_EQ(run.record.restarts_used, 2);
  run.wait(milliseconds(2'100));
  EXPECT_TRUE(run.step()) << "an agent that offers none does not hold up the run";
  EXPECT_EQ(run.record.restarts_used, 3);
}

TEST(DecideTest, FewerThanMinNodesFormAgainAndKeepTheirIds) {
  Rendezvous run(2, 2);
  run.form({"a", "b"});
  run.seen.agents.at("b").is_dead = true;
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kForming);
  EXPECT_EQ(run.record.generation.number, 1U);
  run.hear("a");
  run.hear("c");
  run.step();
  EXPECT_EQ(run.members(), (Names{"a", "c"}));
  EXPECT_EQ(run.record.generation.members[0].id, 1U);
  EXPECT_EQ(run.record.generation.number, 2U);
}

TEST(DecideTest, WhileNoAgentThatHasTheStateIsHeardNothingIsDecided) {
  Rendezvous run(1, 2);
  run.record.settings.is_embedded = false;
  run.form({"b"});
  run.wait(seconds(3));
  run.hear("a");
  while (run.step()) {
  }
  // "b" may be making steps on the other side of a cut network.
  run.wait(seconds(3));
  run.hear("a", [](Report& report) { report.recovered = 0; });
  EXPECT_FALSE(run.step());
  EXPECT_TRUE(run.record.generation.find(1) != nullptr) << run.record.generation.cause;
  run.wait(run.settings.join_timeout);
  run.hear("a", [](Report& report) { report.recovered = 0; });
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
}

void has_no_state(Report& report) {
  report.recovered = 0;
}
// "b" has the state, and "a" joins it.
Rendezvous run_that_one_joins() {
  Rendezvous run(1, 2);
  run.record.settings.is_embedded = false;
  run.form({"b"});
  run.hear("a", has_no_state);
  run.step();
  return run;
}

// It is heard all the time, and hears of nothing.
TEST(DecideTest, AnAgentThatHasTheStateAndHearsOfNoGenerationIsNotWaitedForWithoutEnd) {
  Rendezvous run = run_that_one_joins();
  ASSERT_EQ(run.members(), (Names{"b", "a"}));
  for (const seconds time : {seconds(3), std::chrono::duration_cast<seconds>(run.settings.join_timeout)}) {
    EXPECT_EQ(run.record.state, RunState::kRunning);
    run.wait(time);
    run.hear("a", has_no_state);
    run.hear("b", [](Report& report) { report.known = report.recovered = 1; });
    run.step();
  }
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(run.record.generation.number, 2U);
}

// The host of an agent that was given notice may go before its ranks have left.
TEST(DecideTest, AnAgentThatLeavesWithTheStateAndIsNotHeardAnyMoreIsNotWaitedForWithoutEnd) {
  Rendezvous run = run_that_one_joins();
  ASSERT_EQ(run.members(), (Names{"b", "a"}));
  run.hear("a", has_no_state);
  run.hear("b", [](Report& report) {
    report.is_leaving = true;
    report.recovered = 1;
  });
  EXPECT_FALSE(run.step()) << "the other one lacks the state yet";
  run.wait(run.settings.join_timeout + seconds(1));
  run.hear("a", has_no_state);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_TRUE(test::contains(run.record.end_cause, "no agent is left that had the state"));
}

// Else the record would say for ever that the run continues, and those that are to resume it would wait for
// its members.
TEST(DecideTest, WhereAllMembersLeaveTheRunEnds) {
  Rendezvous run(1, 3);
  run.record.settings.is_embedded = false;
  run.form({"a", "b", "c"});
  const auto leave = [](Report& report) { report.is_leaving = true; };
  run.seen.agents.at("c").is_dead = true;
  run.hear("a", leave);
  run.hear("b", leave);
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_EQ(
      run.record.end_cause,
      "all members leave, so the run can be resumed from its last checkpoint: agent 1 at host-a:1 leaves; "
      "agent 2 at host-b:1 leaves; agent 3 at host-c:1 died");
}

TEST(DecideTest, WhoHasJustGotTheStateHasIt) {
  Rendezvous run = run_that_one_joins();
  ASSERT_EQ(run.members(), (Names{"b", "a"}));
  run.hear(
      "a");  // its ranks have begun a step, and the one that had the state dies before the record says so
  run.seen.agents.at("b").is_dead = true;
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"a"})) << run.record.end_cause;
  EXPECT_EQ(run.record.state, RunState::kRunning) << run.record.end_cause;
}

// Else a process that has lost its state would begin at the step of the last record, and nobody would notice.
TEST(DecideTest, WhoBeginsToDecideHearsFirstHowManyStepsAreCommitted) {
  Rendezvous run(1, 3);
  run.record.settings.is_embedded = false;
  run.form({"b", "c"});
  run.seen.agents.erase("b");  // another agent decides now, and has heard of the death of "c" alone
  run.seen.agents.at("c").is_dead = true;
  run.seen.since = run.seen.decides_since = run.seen.now;
  EXPECT_FALSE(run.step()) << run.record.generation.cause;
  run.hear("b");
  run.seen.agents.at("b").most_steps = 500;
  EXPECT_TRUE(run.step());
  EXPECT_EQ(run.members(), (Names{"b"}));
  EXPECT_EQ(run.record.generation.committed_steps, 500U);
}

TEST(DecideTest, WithoutASurvivorTheStateIsLost) {
  Rendezvous run(1, 2);
  run.record.settings.is_embedded = false;
  run.form({"b"});
  run.seen.agents.at("b").is_dead = true;
  run.hear("a");
  run.step();
  run.step();
  EXPECT_EQ(run.record.state, RunState::kFailed);
  EXPECT_TRUE(test::contains(run.record.end_cause, "no agent is left that had the state of generation 1"));
}

}  // namespace
}  // namespace cohort::membership

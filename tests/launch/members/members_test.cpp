// What an agent of an elastic run says and prints, from what its ranks say.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "cohort/launch/internal/members/change_times.h"
#include "cohort/launch/internal/members/rank_fold.h"
#include "cohort/launch/internal/members/rank_watch.h"

namespace cohort::launch {
namespace {

using membership::MemberStatus;
using membership::RankStatus;
using std::chrono::milliseconds;

RankStatus rank_in(std::uint64_t entered, std::uint64_t steps) {
  RankStatus status;
  status.is_ready = true;
  status.entered = status.recovered = entered;
  status.committed_steps = steps;
  return status;
}

TEST(RankFoldTest, AnAgentIsWhereTheLastOfItsRanksIs) {
  MemberStatus before;
  before.store = "n1:1";
  before.num_processes = 3;
  before.committed_steps = 4;
  before.is_leaving = true;
  std::vector<RankStatus> ranks{rank_in(3, 7), rank_in(2, 6), rank_in(3, 5)};
  ranks[1].recovered = 1;
  ranks[2].is_finished = true;
  const MemberStatus status = fold_ranks(before, ranks, std::nullopt);
  EXPECT_EQ(status.entered, 2U);
  EXPECT_EQ(status.recovered, 1U);
  EXPECT_EQ(status.committed_steps, 7U);
  EXPECT_TRUE(status.is_ready);
  EXPECT_FALSE(status.is_finished);
  EXPECT_TRUE(status.is_leaving);
  EXPECT_EQ(status.store, "n1:1");
  EXPECT_EQ(status.num_processes, 3);
}

TEST(RankFoldTest, LinksAndStatesAreThoseOfItsGeneration) {
  std::vector<RankStatus> ranks{rank_in(3, 7), rank_in(3, 7), rank_in(4, 7)};
  ranks[0].lost_links = {5, 2};
  ranks[1].lost_links = {2, 9};
  ranks[2].lost_links = {1};
  ranks[2].is_state_lost = true;
  MemberStatus status = fold_ranks({}, ranks, std::nullopt);
  EXPECT_EQ(status.lost_links, (std::vector<membership::MemberId>{2, 5, 9}));
  EXPECT_FALSE(status.is_state_lost);
  ranks[0].is_state_lost = true;
  EXPECT_TRUE(fold_ranks({}, ranks, std::nullopt).is_state_lost);
}

TEST(RankFoldTest, ASignalThatHasStoppedTheRanksIsToldOnceAllHaveFinished) {
  std::vector<RankStatus> ranks{rank_in(3, 7), rank_in(3, 7)};
  EXPECT_EQ(fold_ranks({}, ranks, std::nullopt).stop_signal, 0);
  for (RankStatus& rank : ranks) rank.is_finished = true;
  ranks[1].stop_signal = 15;
  const MemberStatus status = fold_ranks({}, ranks, std::nullopt);
  EXPECT_TRUE(status.is_finished);
  EXPECT_EQ(status.stop_signal, 15);
}

TEST(RankFoldTest, ALossIsOfTheGenerationWhateverASuccessorSays) {
  const std::vector<RankStatus> ranks{rank_in(3, 7), RankStatus()};
  const MemberStatus lost = fold_ranks({}, ranks, RankLoss{3, "rank 1 was killed", 137});
  EXPECT_EQ(lost.entered, 3U);
  EXPECT_EQ(lost.failure, "rank 1 was killed");
  EXPECT_EQ(lost.exit_status, 137);
  EXPECT_FALSE(lost.ends_run);
  EXPECT_TRUE(fold_ranks({}, ranks, RankLoss{3, "rank 1 was killed", 137, true}).ends_run);
  EXPECT_FALSE(lost.is_ready);
  EXPECT_EQ(lost.recovered, 0U);
  const MemberStatus later = fold_ranks(lost, ranks, std::nullopt);
  EXPECT_EQ(later.entered, 0U);
  EXPECT_EQ(later.failure, "");
  EXPECT_EQ(later.exit_status, 0);
}

TEST(ChangeTimesTest, AChangeIsOneLineWithThePartsThatAreKnown) {
  const ChangeTimes::Time begin = ChangeTimes::Time() + std::chrono::hours(1);
  ChangeTimes times;
  EXPECT_EQ(times.note_ranks(0, 0, begin), "");
  EXPECT_EQ(times.note_generation(1, "the run begins", 0, begin), "");
  EXPECT_EQ(times.note_ranks(1, 0, begin + milliseconds(2)), "");
  EXPECT_EQ(times.note_ranks(1, 1, begin + milliseconds(5)),
            "generation 1: the run begins; rebuild 2.0 ms, redo 3.0 ms, total 5.0 ms");
  EXPECT_EQ(times.note_ranks(1, 1, begin + milliseconds(6)), "") << "once";
  times.note_cause(begin + milliseconds(10), std::nullopt);
  times.note_cause(begin + milliseconds(11), begin);
  EXPECT_EQ(times.note_generation(2, "a link was lost", 0, begin + milliseconds(13)), "");
  EXPECT_EQ(times.note_ranks(2, 2, begin + milliseconds(20)),
            "generation 2: a link was lost; agree 3.0 ms, rebuild 7.0 ms, redo 0.0 ms, total 10.0 ms");
}

TEST(ChangeTimesTest, ADeathIsDetectedAtMostSoLateAsItWasKnownToLive) {
  const ChangeTimes::Time begin = ChangeTimes::Time() + std::chrono::hours(1);
  ChangeTimes times;
  times.note_cause(begin + milliseconds(40), begin + milliseconds(10));
  times.note_generation(2, "a rank died", 0, begin + milliseconds(45));
  times.note_ranks(2, 1, begin + milliseconds(55));
  EXPECT_EQ(times.note_ranks(2, 2, begin + milliseconds(75)),
            "generation 2: a rank died; detect <= 30.0 ms, agree 5.0 ms, rebuild 10.0 ms, redo 20.0 ms, "
            "total <= 65.0 ms");
  // Of another agent, which this node learns with the generation.
  times.note_generation(3, "agent 2 is silent", 500, begin + milliseconds(1'000));
  times.note_ranks(3, 2, begin + milliseconds(1'010));
  EXPECT_EQ(times.note_ranks(3, 3, begin + milliseconds(1'020)),
            "generation 3: agent 2 is silent; detect <= 500.0 ms, rebuild 10.0 ms, redo 10.0 ms, "
            "total <= 520.0 ms");
  // Ranks of this node have lost their link before: the rest is the time until agents have agreed.
  times.note_cause(begin + milliseconds(1'900), std::nullopt);
  times.note_generation(4, "agent 3 died", 150, begin + milliseconds(2'000));
  EXPECT_EQ(times.note_ranks(4, 4, begin + milliseconds(2'010)),
            "generation 4: agent 3 died; detect <= 50.0 ms, agree 100.0 ms, rebuild 10.0 ms, redo 0.0 ms, "
            "total <= 160.0 ms");
}

// The parts that are printed are the whole, whatever was seen in which order.
TEST(ChangeTimesTest, PartsAddUpToTheTotal) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2'000; ++round) {
    ChangeTimes::Time now = ChangeTimes::Time() + std::chrono::hours(1);
    const auto later = [&] { return now += milliseconds(random() % 50); };
    ChangeTimes times;
    const ChangeTimes::Time alive_at = now;
    if (random() % 2 == 0) {
      times.note_cause(later(), random() % 2 == 0 ? std::optional(alive_at) : std::nullopt);
    }
    times.note_generation(2, "a cause", random() % 2 == 0 ? random() % 200 : 0, later());
    times.note_ranks(2, 1, later());
    const std::string line = times.note_ranks(2, 2, later());
    const auto number_after = [&](const std::string& part) {
      const std::size_t at = line.find(part);
      if (at == std::string::npos) return 0.0;
      return std::stod(line.substr(line.find_first_of("0123456789", at)));
    };
    const double sum =
        number_after("detect") + number_after("agree") + number_after("rebuild") + number_after("redo");
    EXPECT_NEAR(sum, number_after("total"), 0.01) << line;
  }
}

TEST(ChangeTimesTest, AChangeThatIsNotOverHasALineToo) {
  const ChangeTimes::Time begin;
  ChangeTimes times;
  times.note_generation(4, "agent 2 leaves", 0, begin);
  times.note_ranks(4, 3, begin + milliseconds(4));
  EXPECT_EQ(
      times.note_generation(5, "agent 3 leaves", 0, begin + milliseconds(9)),
      "generation 4: agent 2 leaves; rebuild 4.0 ms, redo >= 5.0 ms, total >= 9.0 ms; another generation "
      "came first");
  times.note_ranks(5, 3, begin + milliseconds(10));
  EXPECT_EQ(times.finish(), "generation 5: agent 3 leaves; rebuild 1.0 ms, total 1.0 ms");
  EXPECT_EQ(times.finish(), "");
  // Nobody gets on for 20 s, as a rank has not come.
  times.note_cause(begin + milliseconds(100), begin + milliseconds(90));
  times.note_generation(6, "agent 2 died", 0, begin + milliseconds(103));
  EXPECT_EQ(times.note_generation(7, "agent 3 died", 0, begin + milliseconds(20'103)),
            "generation 6: agent 2 died; detect <= 10.0 ms, agree 3.0 ms, rebuild >= 20000.0 ms, "
            "total >= 20003.0 ms; another generation came first");
}

ObservedRank observed_rank(RankStatus status, int pid, std::uint64_t to_enter) {
  return {.status = std::move(status), .pid = pid, .to_enter = to_enter, .process = 2};
}

TEST(RankWatchTest, ARankThatDoesNotEnterIsStuckUntilItDoes) {
  RankWatch watch(milliseconds(100), milliseconds(0));
  const RankWatch::Time begin;
  const auto look = [&](const RankStatus& first, const RankStatus& second, int ms, int pid = 11) {
    return watch.note({observed_rank(first, 10, 3), observed_rank(second, pid, 3)}, begin + milliseconds(ms));
  };
  EXPECT_TRUE(look(rank_in(3, 7), RankStatus(), 0).empty());
  EXPECT_TRUE(look(rank_in(3, 7), RankStatus(), 99).empty());
  EXPECT_EQ(watch.stuck(), "");
  const auto lines = look(rank_in(3, 8), RankStatus(), 100);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(
      watch.stuck(),
      "local rank 1 (process 2 of generation 3, process id 11) has not entered it for 100 ms: it has not "
      "come to its first Session::enter()");
  EXPECT_EQ(lines[0].rfind(watch.stuck() + ". This node is given up until it does. Try: gdb -p 11", 0), 0U)
      << lines[0];
  EXPECT_TRUE(look(rank_in(3, 9), RankStatus(), 300).empty()) << "once";
  EXPECT_NE(watch.stuck(), "");
  // It waits, as this node is no member, until it says something.
  EXPECT_TRUE(watch
                  .note({observed_rank(rank_in(3, 9), 10, 0), observed_rank(RankStatus(), 11, 0)},
                        begin + milliseconds(400))
                  .empty());
  EXPECT_NE(watch.stuck(), "");
  RankStatus ready;
  ready.is_ready = true;
  watch.note({observed_rank(rank_in(3, 9), 10, 0), observed_rank(ready, 11, 0)}, begin + milliseconds(500));
  EXPECT_EQ(watch.stuck(), "");
  // It has all of its time again, with the next generation.
  EXPECT_TRUE(
      watch
          .note({observed_rank(rank_in(3, 9), 10, 4), observed_rank(ready, 11, 4)}, begin + milliseconds(900))
          .empty());
  EXPECT_EQ(watch.stuck(), "");
  watch.note({observed_rank(rank_in(4, 9), 10, 4), observed_rank(ready, 11, 4)}, begin + milliseconds(1'000));
  EXPECT_NE(watch.stuck(), "");
  EXPECT_TRUE(watch
                  .note({observed_rank(rank_in(4, 9), 10, 4), observed_rank(RankStatus(), 12, 4)},
                        begin + milliseconds(1'001))
                  .empty());
  EXPECT_EQ(watch.stuck(), "") << "it has a successor";
}

TEST(RankWatchTest, FurtherGenerationsGiveAStuckRankNoMoreTime) {
  RankWatch watch(milliseconds(100), milliseconds(0));
  const RankWatch::Time begin;
  for (int i = 0; i < 10; ++i) {
    watch.note({observed_rank(RankStatus(), 10, static_cast<std::uint64_t>(3 + i))},
               begin + milliseconds(10 * i));
    EXPECT_EQ(watch.stuck(), "");
  }
  watch.note({observed_rank(RankStatus(), 10, 13)}, begin + milliseconds(100));
  EXPECT_NE(watch.stuck(), "");
}

// A thread of its own answers the agent, also where the program hangs for ever.
TEST(RankWatchTest, ARankThatAnswersItsAgentStaysStuck) {
  RankWatch watch(milliseconds(100), milliseconds(100));
  const RankWatch::Time begin;
  RankStatus status = rank_in(3, 7);
  for (int i = 0; i < 30; ++i) {
    ++status.heard;
    watch.note({observed_rank(status, 10, i < 15 ? 4 : 0)}, begin + milliseconds(10 * i));
    EXPECT_EQ(watch.stuck().empty(), i < 10) << i;
  }
  ++status.committed_steps;
  watch.note({observed_rank(status, 10, 0)}, begin + milliseconds(300));
  EXPECT_EQ(watch.stuck(), "");
}

TEST(RankWatchTest, WithoutALimitARankThatHasBeenInTheRunIsNotStuck) {
  RankWatch watch(milliseconds(100), milliseconds(0));
  const RankWatch::Time begin;
  const std::vector<ObservedRank> ranks{observed_rank(rank_in(3, 7), 10, 4)};
  for (int ms = 0; ms < 100'000; ms += 500) watch.note(ranks, begin + milliseconds(ms));
  EXPECT_EQ(watch.stuck(), "");
}

// It is in a step, or in an evaluation between two.
TEST(RankWatchTest, ARankThatHasBeenInTheRunMayTakeAsLongAsAStep) {
  RankWatch watch(milliseconds(100), milliseconds(500));
  const RankWatch::Time begin;
  const std::vector<ObservedRank> ranks{observed_rank(rank_in(3, 7), 10, 4),
                                        observed_rank(RankStatus(), 11, 4)};
  watch.note(ranks, begin);
  watch.note(ranks, begin + milliseconds(499));
  EXPECT_EQ(watch.stuck().find("local rank 0"), std::string::npos) << watch.stuck();
  EXPECT_NE(watch.stuck().find("local rank 1"), std::string::npos);
  const auto lines = watch.note(ranks, begin + milliseconds(500));
  EXPECT_NE(watch.stuck().find("local rank 0"), std::string::npos);
  ASSERT_FALSE(lines.empty());
  EXPECT_NE(lines[0].find("progress_timeout=SECONDS"), std::string::npos) << lines[0];
}

TEST(RankWatchTest, TimeInWhichTheAgentWasStoppedItselfDoesNotCount) {
  RankWatch watch(milliseconds(100), milliseconds(100));
  const RankWatch::Time begin;
  const std::vector<ObservedRank> ranks{observed_rank(rank_in(3, 7), 10, 4),
                                        observed_rank(rank_in(3, 7), 11, 3)};
  watch.note(ranks, begin);
  EXPECT_TRUE(watch.note(ranks, begin + std::chrono::minutes(1)).empty());
  EXPECT_EQ(watch.note(ranks, begin + std::chrono::minutes(1) + milliseconds(100)).size(), 2U);
}

TEST(RankWatchTest, ARankThatNeitherGetsOnNorWaitsIsNamedOnce) {
  RankWatch watch(std::chrono::hours(1), milliseconds(100));
  const RankWatch::Time begin;
  RankStatus waiting = rank_in(3, 7), stuck = rank_in(3, 7), finished = rank_in(3, 7);
  finished.is_finished = true;
  int ms = 0;
  const auto look = [&](int later) {
    ms += later;
    return watch.note(
        {observed_rank(waiting, 10, 3), observed_rank(stuck, 11, 3), observed_rank(finished, 12, 3),
         observed_rank(RankStatus(), 0, 3), observed_rank(waiting, 14, 0)},
        begin + milliseconds(ms));
  };
  look(0);
  waiting.is_waiting = true;
  EXPECT_TRUE(look(99).empty());
  const auto lines = look(1);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(
      lines[0].rfind("local rank 1 (process 2 of generation 3, process id 11) has made no progress for "
                     "100 ms, and does not wait for others: it is in generation 3, after step 7. Try: gdb",
                     0),
      0U)
      << lines[0];
  EXPECT_TRUE(look(500).empty());
  ++stuck.committed_steps;
  EXPECT_EQ(look(1), std::vector<std::string>{"local rank 1 makes progress again"});
  EXPECT_EQ(look(100).size(), 1U);
  // A copy of the state is progress, and that it does not wait any more is none.
  waiting.is_waiting = false;
  EXPECT_EQ(look(1).size(), 1U);
  ++waiting.state_bytes;
  EXPECT_EQ(look(1), std::vector<std::string>{"local rank 0 makes progress again"});
  EXPECT_EQ(watch.stuck(), "") << "nobody is given up for it";
}

TEST(RankWatchTest, ATimeThatIsLongerThanRanksWaitForEachOtherIsNamedOnce) {
  const RankWatch::Time begin;
  RankStatus status = rank_in(3, 7);
  const auto lines_of = [&](milliseconds enter, milliseconds progress, std::uint64_t timeout_ms) {
    status.timeout_ms = timeout_ms;
    RankWatch watch(enter, progress);
    const std::vector<ObservedRank> ranks{observed_rank(status, 10, 3), observed_rank(status, 11, 3)};
    auto lines = watch.note(ranks, begin);
    EXPECT_TRUE(watch.note(ranks, begin).empty());
    return lines;
  };
  const milliseconds five(300'000), ten(600'000), twenty(1'200'000);
  EXPECT_TRUE(lines_of(five, five, 600'000).empty());
  EXPECT_TRUE(lines_of(ten, ten, 600'000).empty());
  EXPECT_TRUE(lines_of(five, twenty, 1'200'000).empty()) << "a program with longer steps";
  EXPECT_TRUE(lines_of(twenty, twenty, 0).empty()) << "it does not say";
  const auto lines = lines_of(five, twenty, 600'000);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].rfind("--rdzv-conf progress_timeout is 1200000 ms, expected at most 600000 ms", 0), 0U)
      << lines[0];
  EXPECT_NE(lines[0].find("Try: a smaller progress_timeout; or a larger comm.timeout"), std::string::npos);
  ASSERT_EQ(lines_of(twenty, five, 600'000).size(), 1U);
  EXPECT_NE(lines_of(twenty, five, 600'000)[0].find("enter_timeout is 1200000 ms"), std::string::npos);
}

TEST(RankWatchTest, ARankThatNeverBeginsIsNamedWithoutAGeneration) {
  RankWatch watch(std::chrono::hours(1), milliseconds(100));
  const RankWatch::Time begin;
  RankStatus ready;
  ready.is_ready = true;
  const auto look = [&](int later) {
    return watch.note({observed_rank(RankStatus(), 10, 0), observed_rank(ready, 11, 0)},
                      begin + milliseconds(later));
  };
  look(0);
  const auto lines = look(100);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].rfind("local rank 0 (process id 10) has made no progress for 100 ms", 0), 0U)
      << lines[0];
  RankWatch off(std::chrono::hours(1), milliseconds(0));
  off.note({observed_rank(RankStatus(), 10, 0)}, begin);
  EXPECT_TRUE(off.note({observed_rank(RankStatus(), 10, 0)}, begin + std::chrono::hours(10)).empty());
}

}  // namespace
}  // namespace cohort::launch

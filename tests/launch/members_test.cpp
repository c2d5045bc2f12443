// What an agent of an elastic run says and prints, from what its ranks say.
#include <gtest/gtest.h>

#include "cohort/launch/internal/members/change_times.h"
#include "cohort/launch/internal/members/rank_fold.h"

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
  const ChangeTimes::Time begin;
  ChangeTimes times;
  EXPECT_EQ(times.note_ranks(0, 0, begin), "");
  EXPECT_EQ(times.note_generation(1, "the run begins", begin), "");
  EXPECT_EQ(times.note_ranks(1, 0, begin + milliseconds(2)), "");
  EXPECT_EQ(times.note_ranks(1, 1, begin + milliseconds(5)),
            "generation 1: the run begins; rebuild 2.0 ms, redo 3.0 ms, total 5.0 ms");
  EXPECT_EQ(times.note_ranks(1, 1, begin + milliseconds(6)), "") << "once";
  times.note_cause(begin + milliseconds(10));
  times.note_cause(begin + milliseconds(11));
  EXPECT_EQ(times.note_generation(2, "a rank died", begin + milliseconds(13)), "");
  EXPECT_EQ(times.note_ranks(2, 2, begin + milliseconds(20)),
            "generation 2: a rank died; agree 3.0 ms, rebuild 7.0 ms, redo 0.0 ms, total 10.0 ms");
}

TEST(ChangeTimesTest, AGenerationThatAnotherOneFollowsAtOnceHasALineToo) {
  const ChangeTimes::Time begin;
  ChangeTimes times;
  times.note_generation(4, "agent 2 died", begin);
  times.note_ranks(4, 3, begin + milliseconds(4));
  EXPECT_EQ(times.note_generation(5, "agent 3 died", begin + milliseconds(9)),
            "generation 4: agent 2 died; rebuild 4.0 ms; another generation came first");
}

}  // namespace
}  // namespace cohort::launch

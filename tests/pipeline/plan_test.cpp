#include "cohort/pipeline/plan.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

TEST(PlanTest, FillDrainDoesEveryForwardFirst) {
  EXPECT_EQ(make_plan({Schedule::kFillDrain, 2, 0, 3}).text(),
            "placement 0: F0.0 sA0.0 F0.1 sA0.1 F0.2 sA0.2 rG0.0 B0.0 rG0.1 B0.1 rG0.2 B0.2\n"
            "placement 1: rA1.0 F1.0 rA1.1 F1.1 rA1.2 F1.2 B1.0 sG1.0 B1.1 sG1.1 B1.2 sG1.2\n");
}

TEST(PlanTest, OneForwardOneBackwardTakesTurnsAfterTheWarmUp) {
  EXPECT_EQ(make_plan({Schedule::kOneFOneB, 2, 0, 3}).text(),
            "placement 0: F0.0 sA0.0 F0.1 sA0.1 rG0.0 B0.0 F0.2 sA0.2 rG0.1 B0.1 rG0.2 B0.2\n"
            "placement 1: rA1.0 F1.0 B1.0 sG1.0 rA1.1 F1.1 B1.1 sG1.1 rA1.2 F1.2 B1.2 sG1.2\n");
}

TEST(PlanTest, InterleavedGivesEachChunkAsManyMicroBatchesAsThereArePlacements) {
  const Plan plan = make_plan({Schedule::kInterleaved, 4, 2, 4});
  std::string forwards;
  for (const Action& action : plan.actions[0]) {
    if (action.kind == ActionKind::kForward) forwards += to_string(action) + " ";
  }
  EXPECT_EQ(forwards, "F0.0 F0.1 F2.0 F2.1 F0.2 F0.3 F2.2 F2.3 ");
  EXPECT_EQ(plan.placement_of(3), 1);
}

TEST(PlanTest, ZeroBubbleLetsAsManyWeightGradientsWaitAsThePlacementHoldsFewerActivations) {
  EXPECT_EQ(
      make_plan({Schedule::kZeroBubble, 2, 0, 3}).text(),
      "placement 0: F0.0 sA0.0 F0.1 sA0.1 rG0.0 I0.0 W0.0 F0.2 sA0.2 rG0.1 I0.1 W0.1 rG0.2 I0.2 W0.2\n"
      "placement 1: rA1.0 F1.0 I1.0 sG1.0 rA1.1 F1.1 I1.1 sG1.1 W1.0 rA1.2 F1.2 I1.2 sG1.2 W1.1 W1.2\n");
}

TEST(PlanTest, StagesOfOnePlacementHandOverWithoutSending) {
  EXPECT_EQ(make_plan({Schedule::kFillDrain, 2, 1, 1}).text(), "placement 0: F0.0 F1.0 B1.0 B0.0\n");
}

TEST(PlanTest, PartsAreTheForwardsAndTheBackwards) {
  const Plan plan = make_plan({Schedule::kFillDrain, 2, 0, 1});
  EXPECT_EQ(forward_part(plan).text(), "placement 0: F0.0 sA0.0\nplacement 1: rA1.0 F1.0\n");
  EXPECT_EQ(backward_part(plan).text(), "placement 0: rG0.0 B0.0\nplacement 1: B1.0 sG1.0\n");
}

TEST(PlanTest, NamesAreReadAsTheyAreWritten) {
  for (const Schedule schedule :
       {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kInterleaved, Schedule::kZeroBubble}) {
    EXPECT_EQ(parse_schedule(to_string(schedule)), schedule);
  }
  EXPECT_EQ(parse_schedule("gpipe"), Schedule::kFillDrain);
  COHORT_EXPECT_THROW_WITH(
      parse_schedule("2f2b"), ConfigError,
      "got schedule \"2f2b\", expected fill_drain (or gpipe), 1f1b, interleaved_1f1b or zb_h1");
}

TEST(PlanTest, RejectsNumbersThatDoNotGoTogether) {
  COHORT_EXPECT_THROW_WITH(make_plan({Schedule::kOneFOneB, 0}), UsageError,
                           "got 0 stages, expected at least 1");
  COHORT_EXPECT_THROW_WITH(make_plan({Schedule::kOneFOneB, 2, 0, 0}), UsageError,
                           "got 0 micro-batches, expected at least 1");
  COHORT_EXPECT_THROW_WITH(make_plan({Schedule::kOneFOneB, 2, -1, 1}), UsageError, "got -1 placements");
  COHORT_EXPECT_THROW_WITH(make_plan({Schedule::kInterleaved, 5, 2, 1}), UsageError,
                           "got 5 stages on 2 placements, expected as many stages on each");
  COHORT_EXPECT_THROW_WITH(make_plan({Schedule::kOneFOneB, 4, 2, 1}), UsageError,
                           "schedule 1f1b got 4 stages on 2 placements, expected one on each");
  COHORT_EXPECT_THROW_WITH(make_plan({Schedule::kZeroBubble, 4, 2, 1}), UsageError, "schedule zb_h1 got 4");
  COHORT_EXPECT_THROW_WITH(make_plan({Schedule::kInterleaved, 4, 4, 1}), UsageError,
                           "expected two or more on each. Try: 1f1b");
}

}  // namespace
}  // namespace cohort::pipeline

#include "cohort/pipeline/plan.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <limits>

#include "cohort/base/error.h"
#include "cohort/pipeline/simulate.h"
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
  for (const Schedule& schedule :
       {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kInterleaved, Schedule::kZeroBubble}) {
    EXPECT_EQ(parse_schedule(to_string(schedule)), schedule);
  }
  EXPECT_EQ(parse_schedule("gpipe"), Schedule::kFillDrain);
  COHORT_EXPECT_THROW_WITH(
      parse_schedule("2f1b"), UsageError,
      "there is no pipeline schedule '2f1b'. Try: 1f1b; the pipeline schedules are 1f1b, ");
}

// 1F1B that holds one micro-batch more; its backwards are split, and all weight gradients wait until the end.
COHORT_REGISTER_PIPELINE_SCHEDULE("late_weights",
                                  {.order =
                                       [](const PlaceInPipeline& place) {
                                         return ActionOrder{.group = place.num_micro_batches,
                                                            .warm_up = place.num_placements - place.placement,
                                                            .max_waiting = place.num_micro_batches};
                                       },
                                   .splits_backward = true,
                                   .max_stages = 1});
COHORT_REGISTER_PIPELINE_SCHEDULE("no_order", {});

TEST(PlanTest, ARegisteredScheduleHasAPlan) {
  EXPECT_EQ(make_plan({Schedule("late_weights"), 2, 0, 2}).text(),
            "placement 0: F0.0 sA0.0 F0.1 sA0.1 rG0.0 I0.0 rG0.1 I0.1 W0.0 W0.1\n"
            "placement 1: rA1.0 F1.0 rA1.1 F1.1 I1.0 sG1.0 I1.1 sG1.1 W1.0 W1.1\n");
  for (int micro_batches = 1; micro_batches < 9; ++micro_batches) {
    const PlanOptions options{Schedule("late_weights"), 4, 0, micro_batches};
    const Simulation simulation = simulate(make_plan(options));
    EXPECT_EQ(simulation.actions.at(3).size(), 3U * static_cast<std::size_t>(micro_batches));
    EXPECT_LE(simulation.peak_memory.at(0), memory_formula(options, 0));
  }
  COHORT_EXPECT_THROW_WITH(bubble_formula({Schedule("late_weights"), 4}), UsageError,
                           "there is no formula for schedule late_weights");
  COHORT_EXPECT_THROW_WITH(make_plan({Schedule("late_weights"), 4, 2, 1}), UsageError,
                           "schedule late_weights got 4 stages on 2 placements, expected one on each");
  COHORT_EXPECT_THROW_WITH(make_plan({Schedule("no_order"), 2}), UsageError,
                           "schedule 'no_order' was registered without an order");
  COHORT_EXPECT_THROW_WITH(register_schedule("1f1b", {.order = [](const auto&) { return ActionOrder(); }}),
                           UsageError, "the pipeline schedule '1f1b' is registered already, by Cohort");
  register_schedule("backwards_first", {.order = [](const auto&) { return ActionOrder{.warm_up = -1}; }});
  COHORT_EXPECT_THROW_WITH(make_plan({Schedule("backwards_first"), 2}), UsageError, "a warm-up of -1");
  COHORT_EXPECT_THROW_WITH(memory_formula({Schedule("backwards_first"), 2}, 0), UsageError,
                           "a warm-up of -1");
}

ActionOrder one_group(const PlaceInPipeline& place) {
  return {.group = place.num_micro_batches};
}

// In a process of its own: what was registered stays.
[[noreturn]] void register_gpipe_at_load() {
  register_schedule_at_load("gpipe", {.order = one_group}, "library.cpp", 7);
  try {
    parse_schedule("gpipe");
  } catch (const UsageError& error) {
    std::fputs(error.what(), stderr);
    std::_Exit(0);
  }
  std::_Exit(1);
}

TEST(PlanDeathTest, NobodyCanRegisterTheOtherNameOfFillDrain) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  COHORT_EXPECT_THROW_WITH(register_schedule("gpipe", {.order = one_group}), UsageError,
                           "the pipeline schedule 'gpipe' is registered already, by Cohort");
  EXPECT_EQ(parse_schedule("gpipe"), Schedule::kFillDrain);
  EXPECT_EXIT(register_gpipe_at_load(), ::testing::ExitedWithCode(0),
              "registered twice: by Cohort and by library.cpp:7");
}

COHORT_REGISTER_PIPELINE_SCHEDULE("no_stages", {.order = one_group, .min_stages = 0});

TEST(PlanTest, NumbersOfStagesThatNoPipelineCanHaveAreRejected) {
  COHORT_EXPECT_THROW_WITH(schedule_type(Schedule("no_stages")), UsageError,
                           "schedule 'no_stages' was registered with min_stages = 0 and max_stages = 0");
  COHORT_EXPECT_THROW_WITH(
      register_schedule("three_to_two", {.order = one_group, .min_stages = 3, .max_stages = 2}), UsageError,
      "min_stages = 3 and max_stages = 2. Try: min_stages from 1 on");
  COHORT_EXPECT_THROW_WITH(register_schedule("to_minus_one", {.order = one_group, .max_stages = -1}),
                           UsageError, "max_stages = -1");
  COHORT_EXPECT_THROW_WITH(register_schedule("without_order", {}), UsageError, "without an order");
}

ActionOrder endless_group(const PlaceInPipeline& /*place*/) {
  return {.group = std::numeric_limits<int>::max()};
}
COHORT_REGISTER_PIPELINE_SCHEDULE("one_group", {.order = one_group});
COHORT_REGISTER_PIPELINE_SCHEDULE("endless_group", {.order = endless_group});

TEST(PlanTest, AGroupMayBeAsLargeAsTheNumberOfMicroBatchesButNotAnyNumber) {
  COHORT_EXPECT_THROW_WITH(
      make_plan({Schedule("endless_group"), 2}), UsageError,
      "a group of 2147483647, a warm-up of 0 and 0 that may wait. Try: a group from 1 to 65536");
  EXPECT_EQ(make_plan({Schedule("one_group"), 1, 0, 65537}).actions.at(0).size(), 2U * 65537);
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

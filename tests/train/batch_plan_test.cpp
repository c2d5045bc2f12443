#include "cohort/train/batch_plan.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

TEST(BatchPlanTest, ABatchOfEachRankMakesAStepOfAllRanks) {
  const BatchPlan plan = batch_plan({.batch_size = 6, .accumulate = 4}, {}, {}, 3);
  EXPECT_EQ(plan.global, 72);
  EXPECT_EQ(plan.step, 24);
  EXPECT_EQ(plan.part, 6);
  EXPECT_EQ(plan.micro_batch, 6);
  EXPECT_EQ(plan.loaded, 6);
  EXPECT_EQ(plan.evaluation, 6);
  EXPECT_EQ(plan.loader_parts, 4);
  EXPECT_EQ(plan.task_parts, 1);
}

TEST(BatchPlanTest, ABatchOfEachVirtualRankMakesAStepOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 4}) {
    const BatchPlan plan = batch_plan({.batch_size = 6, .accumulate = 2}, {.virtual_ranks = 4}, {}, ranks);
    EXPECT_EQ(plan.global, 48);
    EXPECT_EQ(plan.step, 12);
    EXPECT_EQ(plan.part, 6);
    EXPECT_EQ(plan.evaluation, 6);
  }
  EXPECT_EQ(num_shares({.virtual_ranks = 4}, 2), 4);
  EXPECT_EQ(num_shares({}, 2), 2);
}

TEST(BatchPlanTest, AGlobalBatchIsDividedAndRoundedUp) {
  const BatchPlan plan =
      batch_plan({.global_batch_size = 50, .eval_batch_size = 9, .accumulate = 4}, {}, {}, 3);
  EXPECT_EQ(plan.global, 50);
  EXPECT_EQ(plan.step, 17);
  EXPECT_EQ(plan.part, 5);
  EXPECT_EQ(plan.evaluation, 9);
}

TEST(BatchPlanTest, WhereSamplesAreSkippedTheTaskCutsTheWholeStep) {
  const BatchPlan plan = batch_plan({.batch_size = 6, .accumulate = 4}, {}, {.on_error = "skip"}, 1);
  EXPECT_EQ(plan.loaded, 24);
  EXPECT_EQ(plan.loader_parts, 1);
  EXPECT_EQ(plan.task_parts, 4);
}

TEST(BatchPlanTest, APipelineCutsAPartIntoMicroBatches) {
  const config::DistributedConfig pipeline{.model = "pipeline", .micro_batches = 4};
  EXPECT_EQ(batch_plan({.batch_size = 10}, pipeline, {}, 1).micro_batch, 3);
  EXPECT_EQ(batch_plan({.batch_size = 2}, pipeline, {}, 1).micro_batch, 1);
  EXPECT_EQ(largest_micro_batch(10, 4), 3);
  EXPECT_EQ(largest_micro_batch(2, 4), 1);
  COHORT_EXPECT_THROW_WITH(batch_plan({}, {.model = "pipe"}, {}, 1), UsageError,
                           "there is no model runner 'pipe'");
}

TEST(BatchPlanTest, ReplicasDivideAPartAndTheLargestCounts) {
  const BatchPlan plan = batch_plan({.batch_size = 10}, {.model = "data_parallel"}, {}, 1);
  EXPECT_EQ(plan.replica(1), 10);
  EXPECT_EQ(plan.replica(3), 4);
  EXPECT_EQ(plan.replica(16), 1);
}

TEST(BatchPlanTest, WholeStepsAreTheSameStepWithTheCutInTheTask) {
  const BatchPlan parts = batch_plan({.batch_size = 6, .accumulate = 4}, {}, {}, 1);
  const BatchPlan whole = parts.with_whole_steps();
  EXPECT_EQ(whole.step, parts.step);
  EXPECT_EQ(whole.part, parts.part);
  EXPECT_EQ(whole.loaded, 24);
  EXPECT_EQ(whole.loader_parts, 1);
  EXPECT_EQ(whole.task_parts, 4);
  EXPECT_EQ(whole.with_whole_steps().task_parts, 4);
}

TEST(BatchPlanTest, SizesBelowOneAreRejected) {
  const config::DistributedConfig no_parts{.model = "pipeline", .micro_batches = 0};
  COHORT_EXPECT_THROW_WITH(batch_plan({}, {}, {}, 0), UsageError, "num_ranks: got 0, expected at least 1");
  COHORT_EXPECT_THROW_WITH(batch_plan({.accumulate = 0}, {}, {}, 1), UsageError, "train.accumulate: got 0");
  COHORT_EXPECT_THROW_WITH(batch_plan({.batch_size = 0}, {}, {}, 1), UsageError, "samples of a step: got 0");
  COHORT_EXPECT_THROW_WITH(batch_plan({}, no_parts, {}, 1), UsageError, "distributed.micro_batches: got 0");
}

TEST(BatchPlanTest, ARateIsForTheStepOfOneRankUnlessAKeySaysOtherwise) {
  EXPECT_EQ(lr_base_size({}, {.batch_size = 6, .accumulate = 4}), 24);
  EXPECT_EQ(lr_base_size({}, {.batch_size = 6, .global_batch_size = 50, .accumulate = 4}), 24);
  EXPECT_EQ(lr_base_size({.lr_base_size = 256}, {.batch_size = 6, .accumulate = 4}), 256);
}

TEST(BatchPlanTest, AnEvaluationBatchOfAllRanksIsOneOfEachRank) {
  EXPECT_EQ(global_evaluation_size({.batch_size = 6}, 3), 18);
  EXPECT_EQ(global_evaluation_size({.batch_size = 6, .eval_batch_size = 9}, 2), 18);
}

}  // namespace
}  // namespace cohort::train

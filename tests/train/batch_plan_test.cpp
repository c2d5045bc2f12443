#include "cohort/train/internal/batch_plan.h"

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
  COHORT_EXPECT_THROW_WITH(batch_plan({}, {.model = "pipe"}, {}, 1), UsageError,
                           "there is no model runner 'pipe'");
}

}  // namespace
}  // namespace cohort::train

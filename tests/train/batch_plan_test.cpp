#include "cohort/train/internal/batch_plan.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

TEST(BatchPlanTest, ABatchOfEachRankMakesAStepOfAllRanks) {
  config::Config config;
  config.train.batch_size = 6;
  config.train.accumulate = 4;
  const BatchPlan plan = batch_plan(config, 3);
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
  config::Config config;
  config.train.global_batch_size = 50;
  config.train.accumulate = 4;
  config.train.eval_batch_size = 9;
  const BatchPlan plan = batch_plan(config, 3);
  EXPECT_EQ(plan.global, 50);
  EXPECT_EQ(plan.step, 17);
  EXPECT_EQ(plan.part, 5);
  EXPECT_EQ(plan.evaluation, 9);
}

TEST(BatchPlanTest, WhereSamplesAreSkippedTheTaskCutsTheWholeStep) {
  config::Config config;
  config.train.batch_size = 6;
  config.train.accumulate = 4;
  config.data.on_error = "skip";
  const BatchPlan plan = batch_plan(config, 1);
  EXPECT_EQ(plan.loaded, 24);
  EXPECT_EQ(plan.loader_parts, 1);
  EXPECT_EQ(plan.task_parts, 4);
}

TEST(BatchPlanTest, APipelineCutsAPartIntoMicroBatches) {
  config::Config config;
  config.distributed.model = "pipeline";
  config.distributed.micro_batches = 4;
  config.train.batch_size = 10;
  EXPECT_EQ(batch_plan(config, 1).micro_batch, 3);
  config.train.batch_size = 2;
  EXPECT_EQ(batch_plan(config, 1).micro_batch, 1);
  config.distributed.model = "pipe";
  COHORT_EXPECT_THROW_WITH(batch_plan(config, 1), UsageError, "there is no model runner 'pipe'");
}

}  // namespace
}  // namespace cohort::train

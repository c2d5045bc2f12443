#include "cohort/train/internal/fit/step_runner.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>

#include <limits>

#include "cohort/base/error.h"
#include "cohort/optim/schedule.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/train/internal/fit/group_coordinator.h"
#include "cohort/train/internal/fit/rates.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

/// Draws a number in each step, and moves the running mean of its module. Its loss is what the test says.
struct DrawingTask : Task {
  DrawingTask() {
    add_module("", net.ptr());
    add_optimizer("", std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1)),
                  optim::cosine(10));
  }
  StepMetrics train_step(data::Batch&) override {
    drawn.push_back(at::rand({1}).item<double>());
    net->running_mean.fill_(7);
    return {{"loss", loss, 1}};
  }
  torch::nn::BatchNorm1d net{1};
  std::vector<double> drawn;
  double loss = 1;
};

TEST(StepRunnerTest, WhatAStepDrawsFollowsFromItsNumberAndTheSeed) {
  const TrainerOptions options = TrainerOptions().seed(3), other_options = TrainerOptions().seed(4);
  const GroupCoordinator ranks(nullptr);
  DrawingTask task;
  StepRunner steps(options, task, ranks), other_steps(other_options, task, ranks);
  data::Batch batch;
  for (const std::int64_t before : {5, 6, 5}) steps.run(batch, before);
  other_steps.run(batch, 5);
  EXPECT_EQ(task.drawn[0], task.drawn[2]);
  EXPECT_NE(task.drawn[0], task.drawn[1]);
  EXPECT_NE(task.drawn[0], task.drawn[3]);
}

TEST(StepRunnerTest, AStepHasTheRateOfItsNumberAndIsToldWithItsMetrics) {
  const TrainerOptions options;
  const GroupCoordinator ranks(nullptr);
  DrawingTask task;
  StepRunner steps(options, task, ranks);
  data::Batch batch;
  const double rate = rate_of_step(task, 5);
  const std::vector<CheckedStep> known = steps.run(batch, 5);
  ASSERT_EQ(known.size(), 1U);
  EXPECT_EQ(known[0].step, 6);
  EXPECT_EQ(known[0].metrics.at(0).value, 1);
  EXPECT_TRUE(known[0].is_finite());
  EXPECT_FALSE(steps.take_pending()) << "numbers on the CPU are known at once";
  EXPECT_DOUBLE_EQ(steps.lr(), rate);
  EXPECT_LT(steps.lr(), 0.1);
}

TEST(StepRunnerTest, BuffersOfAStepThatIsNotFiniteAreRestoredWhereTheRunContinues) {
  const GroupCoordinator ranks(nullptr);
  for (const bool stops : {false, true}) {
    const TrainerOptions options = TrainerOptions().stop_on_non_finite(stops);
    DrawingTask task;
    task.loss = std::numeric_limits<double>::quiet_NaN();
    StepRunner steps(options, task, ranks);
    data::Batch batch;
    EXPECT_FALSE(steps.run(batch, 0).at(0).is_finite());
    EXPECT_EQ(task.net->running_mean.item<float>(), stops ? 7 : 0);
  }
}

TEST(StepRunnerTest, ALossOfAVirtualRankThatIsNotFiniteAndWasNotToldIsRejected) {
  struct Silent : DrawingTask {
    StepMetrics train_step(data::Batch& batch) override {
      average_gradients(*optimizers().front().optimizer, static_cast<double>(batch.whole_size));
      return DrawingTask::train_step(batch);
    }
  };
  const auto sync = std::make_shared<parallel::VirtualRankSync>(
      comm::Group(), parallel::VirtualRankOptions{.num_virtual_ranks = 1});
  const TrainerOptions options = TrainerOptions().gradient_sync(sync);
  const GroupCoordinator ranks(nullptr);
  Silent task;
  task.set_gradient_sync(sync);
  sync->begin(task.parts());
  StepRunner steps(options, task, ranks);
  data::Batch batch;
  steps.run(batch, 0);
  task.loss = std::numeric_limits<double>::quiet_NaN();
  COHORT_EXPECT_THROW_WITH(steps.run(batch, 1), UsageError,
                           "a loss of a virtual rank is not finite, and average_gradients() was not told");
}

TEST(StepRunnerTest, ATaskThatDoesNotAverageOverItsRanksIsRejected) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const TrainerOptions options;
    const GroupCoordinator ranks(&group);
    DrawingTask task;
    StepRunner steps(options, task, ranks);
    data::Batch batch;
    COHORT_EXPECT_THROW_WITH(
        steps.run(batch, 0), UsageError,
        "did not average gradients over the 2 ranks: each would train a model of its own");
  });
}

}  // namespace
}  // namespace cohort::train

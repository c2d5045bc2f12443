// Losses and gradients that are not finite: no step is made of them, no mean holds them, no checkpoint is
// saved before it is known. A tensor on the CPU stands for one on an accelerator, which is looked at a step
// later.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/core/error.h"
#include "cohort/core/log.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/sgd.h"
#include "cohort/train/classification.h"
#include "cohort/train/step_check.h"
#include "cohort/train/trainer.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"
#include "tests/train/steep.h"

namespace cohort::train {
namespace {

using test::Steep;
using test::TempDir;

constexpr std::int64_t kSteps = 5;  // of an epoch

data::Loader make_loader() {
  at::manual_seed(7);
  const at::Tensor input = at::randn({kSteps * 8, 6});
  return data::Loader(std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{input, input.argmax(1)}),
                      {.batch_size = 8});
}

std::vector<at::Tensor> copy_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& parameter : module.parameters()) copies.push_back(parameter.detach().clone());
  return copies;
}

/// Parameters after each step, from that before the first on.
struct Watch : Callback {
  explicit Watch(const torch::nn::Module& of) : module(of) { after.push_back(copy_of(of)); }
  void on_step_end(const StepReport&) override { after.push_back(copy_of(module)); }
  bool changed_in(std::size_t step) const {
    for (std::size_t i = 0; i < after[step].size(); ++i)
      if (!at::equal(after[step][i], after[step - 1][i])) return true;
    return false;
  }
  const torch::nn::Module& module;
  std::vector<std::vector<at::Tensor>> after;
};

std::shared_ptr<optim::Optimizer> make(const std::string& name, const std::vector<at::Tensor>& parameters) {
  if (name == "adamw") return std::make_shared<optim::AdamW>(parameters, optim::AdamWOptions(0.01));
  return std::make_shared<optim::SGD>(parameters, optim::SGDOptions(0.1).momentum(0.9));
}

std::string log_of(const std::function<void()>& work) {
  std::string text;
  core::set_log_sink([&](core::LogLevel, std::string_view line) { text += std::string(line) + "\n"; });
  work();
  core::set_log_sink({});
  return text;
}

TEST(NonFiniteTest, AnInfiniteGradientOfAFiniteLossChangesNothing) {
  for (const std::string optimizer : {"sgd", "adamw"}) {
    for (const double clip_norm : {0.0, 1.0}) {
      for (const std::int64_t accumulate : {1, 2}) {
        SCOPED_TRACE(core::concat(optimizer, ", clip_norm ", clip_norm, ", accumulate ", accumulate));
        Steep net(3 * accumulate);
        ClassificationTask task(net.ptr(), make(optimizer, net->parameters()), nullptr,
                                ClassificationOptions().clip_norm(clip_norm).accumulate(accumulate));
        data::Loader loader = make_loader();
        Trainer trainer(TrainerOptions().stop_on_non_finite(false));
        const auto watch = std::make_shared<Watch>(*net);
        trainer.add_callback(watch);
        FitResult result;
        const std::string log = log_of([&] { result = trainer.fit(task, loader); });
        EXPECT_NE(log.find("a gradient of step 3 is not finite; going on (1 so far)"), std::string::npos)
            << log;
        for (std::size_t step = 1; step <= kSteps; ++step)
          EXPECT_EQ(watch->changed_in(step), step != 3) << step;
        for (const at::Tensor& parameter : net->parameters())
          EXPECT_TRUE(at::isfinite(parameter).all().item<bool>());
        EXPECT_TRUE(std::isfinite(result.metrics.at("train_loss")));
      }
    }
  }
}

TEST(NonFiniteTest, AnInfiniteGradientStopsTheRunAndNamesTheParameter) {
  Steep net(3);
  ClassificationTask task(net.ptr(), make("sgd", net->parameters()), nullptr);
  data::Loader loader = make_loader();
  COHORT_EXPECT_THROW_WITH(Trainer(TrainerOptions()).fit(task, loader), NumericError,
                           "a gradient of step 3 (epoch 1) is not finite; the first is that of steep");
}

TEST(NonFiniteTest, AModelThatReportsNoLayersIsToldByItsInputAndOutput) {
  data::Loader loader = make_loader();
  Steep broken(0);
  broken->steep.data().fill_(std::nan(""));
  ClassificationTask task(torch::nn::AnyModule(broken), make("sgd", broken->parameters()), nullptr);
  COHORT_EXPECT_THROW_WITH(
      Trainer(TrainerOptions()).fit(task, loader), NumericError,
      "the loss of step 1 (epoch 1) is not finite; the model's output is not finite. Try");

  Steep sound(0);
  const at::Tensor input = at::full({8, 6}, std::nan(""), at::kFloat);
  data::Loader bad(
      std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{input, at::zeros({8}, at::kLong)}),
      {.batch_size = 8});
  ClassificationTask other(sound.ptr(), make("sgd", sound->parameters()), nullptr);
  COHORT_EXPECT_THROW_WITH(Trainer(TrainerOptions()).fit(other, bad), NumericError,
                           "is not finite; the model's input is not finite. Try");
}

/// Losses 1, 2, 3, ... of the steps, with some that are not finite, as an accelerator gives them: known
/// later.
struct LateTask : Task {
  explicit LateTask(std::vector<std::int64_t> bad) : bad_steps(std::move(bad)) {
    add_module("", net.ptr());
    add_optimizer("", std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1)));
  }
  StepMetrics train_step(data::Batch& batch) override {
    ++step;
    const bool is_bad = std::count(bad_steps.begin(), bad_steps.end(), step) > 0;
    Metric loss("loss", 0.0, static_cast<double>(batch.size));
    loss.device_value = at::scalar_tensor(is_bad ? std::nan("") : static_cast<double>(step));
    return {loss};
  }
  torch::nn::Linear net{2, 2};
  std::vector<std::int64_t> bad_steps;
  std::int64_t step = 0;
};

TEST(NonFiniteTest, TheBadStepIsLeftOutOfTheMeanAndTheGoodStepAfterItIsNot) {
  struct Case {
    std::vector<std::int64_t> bad;
    double mean;
  };
  for (const Case& each :
       {Case{{}, 3.0}, Case{{3}, 3.0}, Case{{1}, 3.5}, Case{{5}, 2.5}, Case{{2, 3}, 10.0 / 3}}) {
    LateTask task(each.bad);
    data::Loader loader = make_loader();
    FitResult result;
    const std::string log = log_of(
        [&] { result = Trainer(TrainerOptions().stop_on_non_finite(false).log_every(2)).fit(task, loader); });
    EXPECT_DOUBLE_EQ(result.metrics.at("train_loss"), each.mean);
    for (const std::int64_t step : each.bad)
      EXPECT_NE(log.find(core::concat("the loss of step ", step, " is not finite")), std::string::npos)
          << log;
  }
}

TEST(NonFiniteTest, TheVeryLastStepIsLookedAt) {
  for (const std::int64_t max_steps : {0, 4}) {
    LateTask task({max_steps == 0 ? 2 * kSteps : max_steps});
    data::Loader loader = make_loader();
    COHORT_EXPECT_THROW_WITH(Trainer(TrainerOptions().epochs(2).max_steps(max_steps)).fit(task, loader),
                             NumericError, "is not finite");
  }
}

TEST(NonFiniteTest, NoCheckpointIsSavedOfAStepThatEndsTheRun) {
  for (const std::int64_t bad : {3, 5, 10}) {
    TempDir dir;
    LateTask task({bad});
    data::Loader loader = make_loader();
    COHORT_EXPECT_THROW_WITH(
        Trainer(TrainerOptions().epochs(2).run_dir(dir.path()).save_every_steps(1)).fit(task, loader),
        NumericError, core::concat("the loss of step ", bad, " "));
    const checkpoint::RunCheckpoints checkpoints(dir / "checkpoints");
    const auto last = checkpoints.find("last");
    ASSERT_TRUE(last.has_value());
    EXPECT_EQ(checkpoint::RunCheckpoints::load(*last).state.at("run").at("step"), bad - 1);
  }
}

TEST(StepCheckTest, WhatIsOnTheCpuIsKnownAtOnce) {
  StepCheck check;
  const auto good = check.add(1, {{"loss", 0.5, 2}}, {});
  ASSERT_EQ(good.size(), 1u);
  EXPECT_TRUE(good[0].is_finite());
  const auto bad_loss = check.add(2, {{"loss", std::nan(""), 2}}, {});
  EXPECT_FALSE(bad_loss.at(0).loss_is_finite);
  EXPECT_EQ(subject_of(bad_loss.at(0)), "the loss of step 2");
  const auto bad_gradient = check.add(3, {{"loss", 0.5, 2}}, {.on_cpu = true});
  EXPECT_FALSE(bad_gradient.at(0).gradients_are_finite);
  EXPECT_EQ(subject_of(bad_gradient.at(0)), "a gradient of step 3");
  EXPECT_FALSE(check.settle());
}

TEST(StepCheckTest, WhatIsElsewhereIsKnownAStepLaterOrWhenAsked) {
  StepCheck check;
  EXPECT_TRUE(check.add(1, {{"loss", 0.5, 2}}, {.on_device = at::ones({})}).empty());
  const auto known = check.add(2, {{"loss", 0.5, 2}}, {.on_device = at::zeros({})});
  ASSERT_EQ(known.size(), 1u);
  EXPECT_EQ(known[0].step, 1);
  EXPECT_FALSE(known[0].gradients_are_finite);
  const auto both = check.add(3, {{"loss", std::nan(""), 2}}, {.on_device = at::zeros({})});
  ASSERT_EQ(both.size(), 2u);  // of step 3 the CPU knows already
  EXPECT_TRUE(both[0].is_finite());
  EXPECT_FALSE(both[1].is_finite());
  EXPECT_TRUE(check.add(4, {}, {.on_device = at::ones({})}).empty());
  EXPECT_EQ(check.settle()->step, 4);
  EXPECT_FALSE(check.settle());
}

}  // namespace
}  // namespace cohort::train

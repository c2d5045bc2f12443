// Losses and gradients that are not finite: no step is made of them, no mean holds them, no checkpoint is
// saved before it is known. A tensor on the CPU stands for one on an accelerator, which is looked at a step
// later.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/data/tensor_dataset.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/sgd.h"
#include "cohort/train/classification.h"
#include "cohort/train/internal/fit/buffers.h"
#include "cohort/train/internal/fit/step_check.h"
#include "cohort/train/trainer.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"
#include "tests/train/small_vgg.h"
#include "tests/train/steep.h"

namespace cohort::train {
namespace {

using test::Steep;
using test::TempDir;

constexpr std::int64_t kSteps = 5;  // of an epoch

data::Loader make_random_loader() {
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
struct ParameterWatch : Callback {
  explicit ParameterWatch(const torch::nn::Module& of) : module(of) { after.push_back(copy_of(of)); }
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
  base::set_log_sink([&](base::LogLevel, std::string_view line) { text += std::string(line) + "\n"; });
  work();
  base::set_log_sink({});
  return text;
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

torch::nn::AnyModule small_resnet() {
  at::manual_seed(4);
  models::ModelOptions options;
  options.name = "resnet18";
  options.num_classes = 4;
  options.in_channels = 1;
  options.image_size = 16;
  return models::make_model(options);
}

TEST(NonFiniteTest, AnInfiniteGradientOfAFiniteLossChangesNothing) {
  for (const std::string optimizer : {"sgd", "adamw"}) {
    for (const double clip_norm : {0.0, 1.0}) {
      for (const std::int64_t accumulate : {1, 2}) {
        SCOPED_TRACE(base::concat(optimizer, ", clip_norm ", clip_norm, ", accumulate ", accumulate));
        Steep net(3 * accumulate);
        ClassificationTask task(net.ptr(), make(optimizer, net->parameters()), nullptr,
                                ClassificationOptions().clip_norm(clip_norm).accumulate(accumulate));
        data::Loader loader = make_random_loader();
        Trainer trainer(TrainerOptions().stop_on_non_finite(false));
        const auto watch = std::make_shared<ParameterWatch>(*net);
        trainer.add_callback(watch);
        FitResult result;
        const std::string log = log_of([&] { result = trainer.fit(task, loader); });
        EXPECT_NE(log.find("a gradient of step 3 is not finite; continuing (1 so far)"), std::string::npos)
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

/// Buffers of a module after each step, from those before the first on.
struct BufferWatch : Callback {
  explicit BufferWatch(const torch::nn::Module& of) : module(of) { copy_buffers(); }
  void on_step_end(const StepReport&) override { copy_buffers(); }
  void copy_buffers() {
    after.emplace_back();
    for (const at::Tensor& buffer : module.buffers()) after.back().push_back(buffer.detach().clone());
  }
  bool changed_in(std::size_t step) const {
    return !std::equal(after[step].begin(), after[step].end(), after[step - 1].begin(),
                       [](const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); });
  }
  const torch::nn::Module& module;
  std::vector<std::vector<at::Tensor>> after;
};

TEST(NonFiniteTest, AStepThatIsLeftOutLeavesNoTraceInRunningStatistics) {
  for (const std::string name : {"vgg11_bn", "resnet18"}) {
    for (const bool script : {false, true}) {
      for (const std::int64_t accumulate : {1, 2}) {
        SCOPED_TRACE(base::concat(name, ", script ", script, ", accumulate ", accumulate));
        const torch::nn::AnyModule model = name == "vgg11_bn" ? test::small_vgg(name) : small_resnet();
        ClassificationTask task(model, make("sgd", model.ptr()->parameters()), nullptr,
                                ClassificationOptions().accumulate(accumulate).script(script));
        at::manual_seed(7);
        const at::Tensor input = at::randn({kSteps * 4, 1, 16, 16});
        input[2 * 4 + 1][0][3][3] = std::numeric_limits<float>::infinity();  // of step 3
        data::Loader loader(std::make_shared<data::TensorDataset>(
                                std::vector<at::Tensor>{input, at::arange(kSteps * 4).remainder(4)}),
                            {.batch_size = 4});
        Trainer trainer(TrainerOptions().stop_on_non_finite(false));
        const auto watch = std::make_shared<BufferWatch>(*model.ptr());
        trainer.add_callback(watch);
        const std::string log = log_of([&] { trainer.fit(task, loader); });
        EXPECT_NE(log.find("the loss of step 3 is not finite; continuing"), std::string::npos) << log;
        for (std::size_t step = 1; step <= kSteps; ++step)
          EXPECT_EQ(watch->changed_in(step), step != 3) << step;
        for (const at::Tensor& buffer : model.ptr()->buffers())
          EXPECT_TRUE(at::isfinite(buffer).all().item<bool>());
      }
    }
  }
}

TEST(KeptBuffersTest, OnAnAcceleratorTheFlagDecidesWithoutAnyoneLooking) {
  const torch::nn::BatchNorm1d norm(2);
  struct WithNorm : LateTask {
    explicit WithNorm(const torch::nn::BatchNorm1d& norm) : LateTask({}) { add_module("norm", norm.ptr()); }
  } with_norm(norm);
  for (const bool bad_loss : {false, true}) {
    for (const double bad_gradient : {0.0, 1.0}) {
      KeptBuffers buffers;
      norm->running_mean.fill_(3);
      buffers.keep(with_norm);
      norm->running_mean.fill_(5);
      norm->num_batches_tracked.fill_(8);
      Metric loss("loss", 0.0, 1);
      loss.device_value = at::scalar_tensor(bad_loss ? std::nan("") : 0.5);
      // A tensor on the CPU stands for the flag on an accelerator.
      buffers.restore_unless_finite({loss}, {.on_device = at::scalar_tensor(bad_gradient)});
      const bool is_left_out = bad_loss || bad_gradient != 0;
      EXPECT_EQ(norm->running_mean[0].item<double>(), is_left_out ? 3 : 5);
      EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>() == 8, !is_left_out);
      norm->num_batches_tracked.fill_(1);
    }
  }
}

TEST(KeptBuffersTest, ABufferThatRepeatsItsElementsIsLeftAlone) {
  struct WithIds : LateTask {
    WithIds() : LateTask({}) {
      ids = net->register_buffer("ids", at::arange(3).expand({4, 3}));
      count = net->register_buffer("count", at::zeros({1}));
    }
    at::Tensor ids, count;
  } task;
  for (const auto& flag : {optim::NonFinite{.on_cpu = true}, {.on_device = at::scalar_tensor(1.0)}}) {
    KeptBuffers buffers;
    for (int step = 0; step < 2; ++step) {
      buffers.keep(task);
      task.count.fill_(7);
      buffers.restore_unless_finite({}, flag);
      EXPECT_EQ(task.count.item<double>(), 0);
    }
  }
  EXPECT_TRUE(at::equal(task.ids[3], at::arange(3)));
}

TEST(KeptBuffersTest, ASparseBufferIsRestoredToo) {
  struct WithNeighbours : LateTask {
    WithNeighbours() : LateTask({}) {
      neighbours = net->register_buffer("neighbours", at::eye(3).to_sparse());
      net->register_buffer("not_there", at::Tensor());
    }
    at::Tensor neighbours;
  } task;
  KeptBuffers buffers;
  for (int step = 0; step < 2; ++step) {
    buffers.keep(task);
    task.neighbours.mul_(2);
    buffers.restore_unless_finite({}, {.on_cpu = true});
    EXPECT_TRUE(at::equal(task.neighbours.to_dense(), at::eye(3)));
  }
}

TEST(NonFiniteTest, AnInfiniteGradientStopsTheRunAndNamesTheParameter) {
  Steep net(3);
  ClassificationTask task(net.ptr(), make("sgd", net->parameters()), nullptr);
  data::Loader loader = make_random_loader();
  COHORT_EXPECT_THROW_WITH(Trainer(TrainerOptions()).fit(task, loader), NumericError,
                           "a gradient of step 3 (epoch 1) is not finite; the first is that of steep");
}

TEST(NonFiniteTest, AModelThatReportsNoLayersIsToldByItsInputAndOutput) {
  data::Loader loader = make_random_loader();
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

TEST(NonFiniteTest, TheBadStepIsLeftOutOfTheMeanAndTheGoodStepAfterItIsNot) {
  struct Case {
    std::vector<std::int64_t> bad;
    double mean;
  };
  for (const Case& each :
       {Case{{}, 3.0}, Case{{3}, 3.0}, Case{{1}, 3.5}, Case{{5}, 2.5}, Case{{2, 3}, 10.0 / 3}}) {
    LateTask task(each.bad);
    data::Loader loader = make_random_loader();
    FitResult result;
    const std::string log = log_of(
        [&] { result = Trainer(TrainerOptions().stop_on_non_finite(false).log_every(2)).fit(task, loader); });
    EXPECT_DOUBLE_EQ(result.metrics.at("train_loss"), each.mean);
    for (const std::int64_t step : each.bad)
      EXPECT_NE(log.find(base::concat("the loss of step ", step, " is not finite")), std::string::npos)
          << log;
  }
}

TEST(NonFiniteTest, TheVeryLastStepIsLookedAt) {
  for (const std::int64_t max_steps : {0, 4}) {
    LateTask task({max_steps == 0 ? 2 * kSteps : max_steps});
    data::Loader loader = make_random_loader();
    COHORT_EXPECT_THROW_WITH(Trainer(TrainerOptions().epochs(2).max_steps(max_steps)).fit(task, loader),
                             NumericError, "is not finite");
  }
}

TEST(NonFiniteTest, NoCheckpointIsSavedOfAStepThatEndsTheRun) {
  for (const std::int64_t bad : {3, 5, 10}) {
    TempDir dir;
    LateTask task({bad});
    data::Loader loader = make_random_loader();
    COHORT_EXPECT_THROW_WITH(
        Trainer(TrainerOptions().epochs(2).run_dir(dir.path()).save_every_steps(1)).fit(task, loader),
        NumericError, base::concat("the loss of step ", bad, " "));
    const checkpoint::RunCheckpoints checkpoints(dir / "checkpoints");
    const auto last = checkpoints.find("last");
    ASSERT_TRUE(last.has_value());
    EXPECT_EQ(checkpoint::RunCheckpoints::load(*last).state.at("run").at("step"), bad - 1);
  }
}

/// Makes a finite step that leaves parameters which are not.
struct Overflowing : LateTask {
  Overflowing() : LateTask({}) {}
  StepMetrics train_step(data::Batch& batch) override {
    if (step == 2) net->parameters()[1].data()[1] = std::numeric_limits<double>::infinity();
    return LateTask::train_step(batch);
  }
};

TEST(NonFiniteTest, NoCheckpointIsSavedOfParametersThatAreNotFinite) {
  for (const bool stops : {true, false}) {
    TempDir dir;
    Overflowing task;
    data::Loader loader = make_random_loader();
    COHORT_EXPECT_THROW_WITH(
        Trainer(TrainerOptions().epochs(2).run_dir(dir.path()).save_every_steps(1).stop_on_non_finite(stops))
            .fit(task, loader),
        NumericError, "parameter bias is not finite after step 3");
    EXPECT_EQ(checkpoint::RunCheckpoints(dir / "checkpoints").load_usable()->content.state["run"]["step"], 2);
  }
}

TEST(NonFiniteTest, ARunThatFailsWhereItWentOnIsToldToTakeAnEarlierCheckpoint) {
  TempDir dir;
  const auto options = [&](const std::string& resume) {
    return TrainerOptions().epochs(2).run_dir(dir.path()).save_every_steps(1).resume(resume);
  };
  data::Loader loader = make_random_loader();
  for (const char* resume : {"", "auto"}) {  // as a run that has diverged fails at each start anew
    LateTask task({4});
    task.step = *resume == '\0' ? 0 : 3;
    std::string message;
    try {
      Trainer(options(resume)).fit(task, loader);
    } catch (const NumericError& error) {
      message = error.what();
    }
    EXPECT_NE(message.find("the loss of step 4"), std::string::npos) << message;
    const bool is_told = message.find("Try: an earlier checkpoint than ") != std::string::npos &&
                         message.find("step_00000003 (--resume PATH)") != std::string::npos;
    EXPECT_EQ(is_told, *resume != '\0') << message;
  }
  LateTask task({5});
  task.step = 3;
  COHORT_EXPECT_THROW_WITH(Trainer(options("auto")).fit(task, loader), NumericError, "Try: a lower learning");
}

TEST(NonFiniteTest, AStartWhoseFirstStepIsNotFiniteDoesNotCount) {
  struct Counts : Callback {
    void on_start_counts(const FitInfo&) override { ++starts; }
    int starts = 0;
  };
  TempDir dir;
  const auto options = TrainerOptions().epochs(1).run_dir(dir.path()).save_every_steps(1).keep(0);
  data::Loader loader = make_random_loader();
  LateTask good({});
  Trainer(options).fit(good, loader);
  const checkpoint::RunCheckpoints checkpoints(dir / "checkpoints");
  const auto last = checkpoints.find("last");
  for (const std::int64_t bad : {1, 2}) {
    LateTask task({bad});
    Trainer trainer(TrainerOptions(options).resume("step_00000002"));
    const auto counts = std::make_shared<Counts>();
    trainer.add_callback(counts);
    COHORT_EXPECT_THROW_WITH(trainer.fit(task, loader), NumericError,
                             base::concat("the loss of step ", 2 + bad, " "));
    EXPECT_EQ(counts->starts, bad == 1 ? 0 : 1);
    EXPECT_EQ(checkpoints.find("last") == last, bad == 1);
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
  EXPECT_FALSE(check.take_pending());
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
  EXPECT_EQ(check.take_pending()->step, 4);
  EXPECT_FALSE(check.take_pending());
}

}  // namespace
}  // namespace cohort::train

#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "cohort/data/loader.h"
#include "cohort/optim/optimizer.h"
#include "cohort/optim/schedule.h"
#include "cohort/train/metrics.h"

namespace cohort::train {

/// What is trained: the modules and optimizers, and what one step does with a batch.
///
/// A user's own training step (two optimizers, a GAN, a regression) is a Task of a few lines:
///
///     struct Regression : cohort::train::Task {
///       Regression() { add_module("", net.ptr()); add_optimizer("", sgd); }
///       StepMetrics train_step(data::Batch& batch) override {
///         sgd->zero_grad();
///         auto loss = torch::mse_loss(net->forward(batch.input()), batch.target());
///         loss.backward();
///         sgd->step();
///         return {{"loss", loss, double(batch.size)}};
///       }
///     };
///
/// Trainer applies each optimizer's schedule before the step, reseeds LibTorch's generators, and saves and
/// restores what was added here. Threads: one caller at a time.
class Task {
 public:
  struct NamedModule {
    std::string name;
    std::shared_ptr<torch::nn::Module> module;
  };
  struct NamedOptimizer {
    std::string name;
    std::shared_ptr<optim::Optimizer> optimizer;
    std::shared_ptr<const optim::Schedule> schedule;  // may be null: the learning rates stay
  };

  virtual ~Task() = default;

  /// One update of the parameters from one local batch. The metric called "loss", where there is one, is
  /// checked by Trainer for NaN and infinity.
  virtual StepMetrics train_step(data::Batch& batch) = 0;

  /// What one batch says about the model in evaluation mode, without gradients.
  /// Throws: UsageError unless overridden.
  virtual StepMetrics eval_step(data::Batch& batch);

  /// Puts every added module in training or evaluation mode.
  virtual void set_training(bool training);

  /// Says, where it can be known, which module's output was the first not to be finite for `batch`; else "".
  virtual std::string find_non_finite(data::Batch& batch);

  const std::vector<NamedModule>& modules() const { return modules_; }
  const std::vector<NamedOptimizer>& optimizers() const { return optimizers_; }

 protected:
  /// Names are prefixes in the checkpoint ("generator" gives "generator.conv.weight"); a task with a single
  /// module uses "" and its file then has the model's own names.
  void add_module(std::string name, std::shared_ptr<torch::nn::Module> module);
  void add_optimizer(std::string name, std::shared_ptr<optim::Optimizer> optimizer,
                     std::shared_ptr<const optim::Schedule> schedule = nullptr);

 private:
  std::vector<NamedModule> modules_;
  std::vector<NamedOptimizer> optimizers_;
};

}  // namespace cohort::train

#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/data/loader.h"
#include "cohort/optim/optimizer.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/task_parts.h"
#include "cohort/train/metrics.h"

namespace cohort::train {

/// What is trained: the modules and optimizers, and what one step does with a batch.
///
/// A user's own training step (two optimizers, a GAN, a regression) is a Task of a few lines:
///
///     struct Regression : cohort::train::Task {
///       Regression() { add_module("", net.ptr()); add_optimizer("", sgd); }
///       cohort::train::StepMetrics train_step(cohort::data::Batch& batch) override {
///         sgd->zero_grad();
///         auto loss = torch::mse_loss(net->forward(batch.input()), batch.target());
///         loss.backward();
///         average_gradients(*sgd, batch.size);
///         step_if_finite(*sgd);
///         return {{"loss", loss, double(batch.size)}};
///       }
///       torch::nn::Linear net{3, 1};
///       std::shared_ptr<cohort::optim::SGD> sgd = std::make_shared<cohort::optim::SGD>(net->parameters());
///     };
///
/// Before each step Trainer applies the schedule of each optimizer and reseeds LibTorch's generators. It
/// saves and restores what was added here. On several ranks a batch may be empty (size 0). Its step calls
/// average_gradients() with 0 samples, and runs no forward and no backward: a mean over no sample is NaN.
/// Threads: one caller at a time.
class Task {
 public:
  virtual ~Task() = default;

  /// One update of the parameters from one local batch. Trainer checks the metric called "loss", where there
  /// is one, and the gradients of step_if_finite() for NaN and infinity.
  virtual StepMetrics train_step(data::Batch& batch) = 0;

  /// What one batch says about the model in evaluation mode, without gradients.
  /// Throws: UsageError unless overridden.
  virtual StepMetrics eval_step(data::Batch& batch);

  /// Puts every added module in training or evaluation mode.
  virtual void set_training(bool training);

  /// Says, where it can be known, which module's output was the first not to be finite for `batch`; else "".
  virtual std::string find_non_finite(data::Batch& batch);

  /// How ranks work together; Trainer sets it for the time of fit().
  void set_gradient_sync(std::shared_ptr<parallel::GradientSync> gradient_sync);
  /// What all ranks learnt when gradients were averaged last, and how often that was.
  const parallel::AverageReport& last_average() const { return last_average_; }
  std::int64_t num_averages() const { return num_averages_; }

  /// What report_metrics() was given since the last call, and how often that was.
  StepMetrics take_reported_metrics() { return std::exchange(reported_, {}); }
  std::int64_t num_reports() const { return num_reports_; }

  /// What step_if_finite() found since the last call.
  optim::NonFinite take_non_finite() { return std::exchange(non_finite_, {}); }

  /// The modules and optimizers that add_module() and add_optimizer() were given, in their order.
  const parallel::TaskParts& parts() const { return parts_; }
  const std::vector<parallel::NamedModule>& modules() const { return parts_.modules; }
  const std::vector<parallel::NamedOptimizer>& optimizers() const { return parts_.optimizers; }

 protected:
  /// Names are prefixes in the checkpoint ("generator" gives "generator.conv.weight"); a task with a single
  /// module uses "" and its file then has the model's own names.
  void add_module(std::string name, std::shared_ptr<torch::nn::Module> module);
  void add_optimizer(std::string name, std::shared_ptr<optim::Optimizer> optimizer,
                     std::shared_ptr<const optim::LRSchedule> schedule = nullptr);

  /// Before average_gradients(): what train_step will return, of all shares of this process. In an elastic
  /// run the metrics then travel with the gradients, so that a process that dies later takes none with it.
  /// Elsewhere it has no effect. A "loss" on the CPU that is not finite makes average_gradients() leave the
  /// step out.
  void report_metrics(const StepMetrics& metrics);
  /// Before the last backward of a step, on every rank or none: gradients are then averaged while it runs.
  /// Takes what average_gradients() takes after it; where `finite` is false no backward need follow.
  void prepare_average(const optim::Optimizer& optimizer, double samples, bool finite = true);
  /// Between backward and step: makes the gradients of the optimizer's parameters those of the joined batch
  /// of all ranks; with one rank it does nothing. `samples`: those that this rank's mean loss was taken over,
  /// 0 where its batch is empty. Returns false, with gradients unchanged, if `finite` is false on any rank:
  /// then no rank may make its step. Collective.
  bool average_gradients(const optim::Optimizer& optimizer, double samples, bool finite = true);
  /// Makes the optimizer's step, after clipping gradients to `clip_norm` where it is above 0. If a gradient
  /// is not finite, parameters and optimizer stay as they are, and Trainer hears of it. Does not wait for an
  /// accelerator. Where gradients were averaged, all ranks decide alike.
  void step_if_finite(optim::Optimizer& optimizer, double clip_norm = 0);
  /// How ranks work together now.
  const parallel::GradientSync& gradient_sync() const { return *gradient_sync_; }

 private:
  parallel::TaskParts parts_;
  std::shared_ptr<parallel::GradientSync> gradient_sync_ = std::make_shared<parallel::GradientSync>();
  parallel::AverageReport last_average_;
  std::int64_t num_averages_ = 0;
  StepMetrics reported_;
  std::int64_t num_reports_ = 0;
  optim::NonFinite non_finite_;
};

}  // namespace cohort::train

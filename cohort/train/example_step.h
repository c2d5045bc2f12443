#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cohort/config/types.h"
#include "cohort/data/dataset.h"
#include "cohort/optim/autocast.h"
#include "cohort/optim/optimizer.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/train/batch_plan.h"

/// A step of a configured run, without the run.
namespace cohort::train {

/// What a step is made from: sections of a configuration, and what the run makes of others. All of it has to
/// be given.
struct ExampleStepOptions {
  config::ModelConfig model;
  config::DataConfig data;
  config::OptimConfig optim;
  config::DistributedConfig distributed;
  config::TrainConfig train;  ///< precision, memory format, label smoothing
  std::int64_t seed;          ///< of the initial values: run.seed
  BatchPlan plan;             ///< batch_plan() of these sections
};

/// Makes the parts of a run's step on the CPU, and computes the step on zeros, as ClassificationTask does.
///
///     const train::ExampleStep step(options);
///     auto model = step.make_model();
///     const auto runner = parallel::make_model_runner(model, step.runner_options());
///     step.run(runner, step.input(8), step.target(8));
///
/// Threads: one caller at a time.
class ExampleStep {
 public:
  /// Reads from the training data what a sample is. Throws: as make_dataset; UsageError for data without
  /// target, or before it is read for a schedule or communication hook that does not exist.
  explicit ExampleStep(ExampleStepOptions options);

  /// Return `samples` zeros of the data's first and second field, laid out as in a batch.
  at::Tensor input(std::int64_t samples) const;
  at::Tensor target(std::int64_t samples) const;
  /// Returns the bytes of both.
  std::int64_t batch_bytes(std::int64_t samples) const;

  /// Returns a model with the run's initial values. Throws: as make_model.
  torch::nn::AnyModule make_model() const;
  /// Returns the run's optimizer for the parameters of `model`. Throws: as optim::make_optimizer.
  std::shared_ptr<optim::Optimizer> make_optimizer(const torch::nn::Module& model) const;
  /// Returns how the run runs its model. Throws: ConfigError for a placement that is not there.
  parallel::ModelRunnerOptions runner_options() const;
  /// Returns the run's virtual ranks; a number of 0 where it has none.
  parallel::VirtualRankOptions virtual_rank_options() const;

  /// Runs forward and loss, in the run's precision, and returns the mean loss with its graph.
  at::Tensor loss(const std::function<at::Tensor(const at::Tensor&)>& forward, const at::Tensor& input,
                  const at::Tensor& target) const;
  /// Runs forward, loss and backward; calls `after_forward` where a runner does not overlap these.
  void run(const parallel::ModelRunner& runner, const at::Tensor& input, const at::Tensor& target,
           const std::function<void()>& after_forward = nullptr) const;

 private:
  std::unique_ptr<optim::Autocast> autocast() const;
  at::Tensor criterion(const at::Tensor& logits, const at::Tensor& target) const;

  ExampleStepOptions options_;
  std::vector<data::Field> fields_;  // of the data: input, target
  data::Field input_;                // what the model gets of a sample
  std::int64_t num_classes_ = 0;
};

}  // namespace cohort::train

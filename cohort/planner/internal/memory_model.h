#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cohort/optim/autocast.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/planner/memory_use.h"
#include "cohort/train/batch_plan.h"
#include "cohort/train/internal/factories.h"
#include "cohort/train/internal/model_runners.h"

/// What plan_memory() plans and measures. Internal to it.
namespace cohort::planner {

/// The step of a run: its model, and what computes beside it.
struct PlannedStep {
  config::ModelConfig model;
  train::ModelSetup setup;
  train::MeasuredStep layers;       ///< its optimizer is the step's
  std::vector<data::Field> fields;  ///< of the data: input, target
  bool bf16 = false;
  double label_smoothing = 0;
};

/// A step's parts, made for planning alone. `place`: MemoryOptions::place. Ownership: keeps a reference to
/// `step`.
class PlannedModel {
 public:
  explicit PlannedModel(const PlannedStep& step, const std::map<std::string, base::Placement>& place = {});

  at::Tensor input(std::int64_t samples) const;
  at::Tensor target(std::int64_t samples) const;
  std::int64_t batch_bytes(std::int64_t samples) const;
  /// As ClassificationTask computes it.
  at::Tensor loss(const std::function<at::Tensor(const at::Tensor&)>& forward, const at::Tensor& input,
                  const at::Tensor& target) const;
  /// Forward, loss and backward, as ClassificationTask has `call` do them; `after_forward` where they do not
  /// overlap.
  void step(const parallel::ModelRunner& call, const at::Tensor& input, const at::Tensor& target,
            const std::function<void()>& after_forward = nullptr) const;

  torch::nn::AnyModule any;
  std::shared_ptr<optim::Optimizer> optimizer;

 private:
  std::unique_ptr<optim::Autocast> autocast() const;
  at::Tensor criterion(const at::Tensor& logits, const at::Tensor& target) const;

  const PlannedStep& step_;
};

class RunnerPlan;

/// What is measured.
struct MeasureInputs {
  const PlannedStep& step;
  const std::map<std::string, base::Placement>& place;  ///< MemoryOptions::place
  const config::DistributedConfig& distributed;         ///< how the model is run
  const train::BatchPlan& sizes;
  const std::vector<base::Placement>& placements;  ///< whose threads are looked at
  const RunnerPlan& runner;
};

/// Runs two steps of the whole batch, and writes what they took beside what is planned.
void measure(MemoryPlan& plan, const MeasureInputs& inputs);

}  // namespace cohort::planner

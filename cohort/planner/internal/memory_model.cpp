// The step for planning is made of the same functions as that of a run, so the plan is of what will run.
// Batches are zeros of the data set's fields. Sizes are rounded up: a plan is for the largest part of a step.
#include "cohort/planner/internal/memory_model.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cohort/parallel/device_mapped.h"

namespace cohort::planner {

PlannedModel::PlannedModel(const PlannedStep& step, const std::map<std::string, base::Placement>& place)
    : step_(step) {
  any = train::make_model(step.model, step.setup);
  if (!place.empty()) parallel::apply_device_map(*any.ptr(), place);
  optimizer = train::make_optimizer(step.layers.optim, *any.ptr());
}

at::Tensor PlannedModel::input(std::int64_t samples) const {
  return train::zero_batch(step_.fields[0], samples);
}

at::Tensor PlannedModel::target(std::int64_t samples) const {
  return train::zero_batch(step_.fields[1], samples);
}

std::int64_t PlannedModel::batch_bytes(std::int64_t samples) const {
  return samples * (step_.fields[0].bytes() + step_.fields[1].bytes());
}

std::unique_ptr<optim::Autocast> PlannedModel::autocast() const {
  if (!step_.bf16) return nullptr;
  return std::make_unique<optim::Autocast>(at::kCPU, at::kBFloat16);
}

at::Tensor PlannedModel::criterion(const at::Tensor& logits, const at::Tensor& target) const {
  // As ClassificationTask does it: the loss is float32 also under autocast, which takes a copy of the logits.
  return at::cross_entropy_loss(logits.to(at::kFloat), target, {}, at::Reduction::Mean, -100,
                                step_.label_smoothing);
}

at::Tensor PlannedModel::loss(const std::function<at::Tensor(const at::Tensor&)>& forward,
                              const at::Tensor& input, const at::Tensor& target) const {
  at::Tensor logits;
  {
    const auto scope = autocast();
    logits = forward(input);
  }
  return criterion(logits, target);
}

void PlannedModel::step(const parallel::ModelRunner& call, const at::Tensor& input, const at::Tensor& target,
                        const std::function<void()>& after_forward) const {
  // A pipeline makes forward and backward of micro-batches in turn, so there is no moment after the forward.
  if (call.step) {
    const auto scope = autocast();
    call.step(
        input, target,
        [this](const at::Tensor& logits, const at::Tensor& labels) { return criterion(logits, labels); }, 1);
    return;
  }
  const at::Tensor value = loss(call.forward, input, target);
  if (after_forward) after_forward();
  value.backward();
}

}  // namespace cohort::planner

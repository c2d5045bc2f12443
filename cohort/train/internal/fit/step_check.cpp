// Numbers on the CPU are known at once; those on an accelerator are read when the next step is added. So at
// most a single step is not known yet, and steps come out in their order. A run that ends names the first bad
// parameter, or the first bad layer while the step's batch is at hand.
#include "cohort/train/internal/fit/step_check.h"

#include <ATen/ops/isfinite.h>

#include <cmath>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::train {
namespace {

/// The name of the first parameter of which `get_tensor` returns one that is not finite; "" if there is none.
template <typename GetTensor>
std::string first_bad_parameter(const Task& task, const GetTensor& get_tensor) {
  for (const parallel::NamedModule& entry : task.modules()) {
    for (const auto& parameter : entry.module->named_parameters()) {
      const at::Tensor tensor = get_tensor(parameter.value());
      if (tensor.defined() && !at::isfinite(tensor).all().template item<bool>()) {
        return entry.name.empty() ? parameter.key() : entry.name + "." + parameter.key();
      }
    }
  }
  return "";
}

std::string first_bad_gradient(const Task& task) {
  const std::string name =
      first_bad_parameter(task, [](const at::Tensor& parameter) { return parameter.grad(); });
  return name.empty() ? "a parameter of no module" : name;
}

std::string advice_at(const StepPlace& place) {
  const std::string usual = base::concat("a lower learning rate (now ", place.lr,
                                         "), clipping by norm, or to continue without such "
                                         "steps (train.on_nonfinite=continue)");
  if (place.resumed_from.empty()) return usual;
  // What diverges may be finite when it is saved, and is lost all the same.
  return base::concat("an earlier checkpoint than ", place.resumed_from,
                      " (--resume PATH), as the model may have diverged before it was saved; then ", usual);
}

}  // namespace

std::vector<CheckedStep> StepCheck::add(std::int64_t step, StepMetrics metrics,
                                        const optim::NonFinite& gradients) {
  std::vector<CheckedStep> known;
  // By now the accelerator has mostly finished that step, so reading it costs little.
  if (auto earlier = take_pending()) known.push_back(std::move(*earlier));
  Pending now{{.step = step, .metrics = std::move(metrics), .gradients_are_finite = !gradients.on_cpu},
              {},
              optim::LateScalar(gradients.on_device)};
  // With virtual ranks a step has a loss of each.
  for (const Metric& metric : now.step.metrics) {
    if (metric.name != "loss") continue;
    // The copy to the host starts at once, after the step and before the next.
    if (metric.device_value.defined()) {
      now.losses.emplace_back(metric.device_value);
    } else if (!std::isfinite(metric.value)) {
      now.step.loss_is_finite = false;
    }
  }
  if (now.step.is_finite() && (!now.losses.empty() || now.gradients.is_defined())) {
    pending_ = std::move(now);
  } else {
    known.push_back(std::move(now.step));
  }
  return known;
}

std::optional<CheckedStep> StepCheck::take_pending() {
  auto pending = std::exchange(pending_, std::nullopt);
  if (!pending) return std::nullopt;
  CheckedStep& step = pending->step;
  for (optim::LateScalar& loss : pending->losses) {
    if (!std::isfinite(loss.read())) step.loss_is_finite = false;
  }
  if (pending->gradients.is_defined()) step.gradients_are_finite = pending->gradients.read() == 0;
  return std::move(step);
}

std::string subject_of(const CheckedStep& checked) {
  return base::concat(checked.loss_is_finite ? "a gradient" : "the loss", " of step ", checked.step);
}

void throw_not_finite(const CheckedStep& checked, Task& task, data::Batch* batch, const StepPlace& place) {
  std::string text = base::concat(subject_of(checked), " (epoch ", place.epoch, ") is not finite");
  const int bad_rank = task.last_average().bad_rank.value_or(place.rank);
  const std::optional<std::int64_t> virtual_rank = task.last_average().bad_virtual_rank;
  if (virtual_rank) text += base::concat(" on virtual rank ", *virtual_rank);
  // Only the rank that has the bad numbers can look for their place.
  if (bad_rank != place.rank) {
    throw NumericError("train.step", virtual_rank ? text : base::concat(text, " on rank ", bad_rank));
  }
  if (virtual_rank && batch != nullptr && batch->share != *virtual_rank) batch = nullptr;  // another one's
  if (batch != nullptr && checked.loss_is_finite) {
    text += "; the first is that of " + first_bad_gradient(task);
  } else if (batch != nullptr) {
    const std::string module = task.find_non_finite(*batch);
    const bool is_whole = module == "input" || module == "output";  // models::first_non_finite: no layer's
    if (!module.empty())
      text += is_whole ? base::concat("; the model's ", module, " is not finite")
                       : "; the first output that is not finite is that of " + module;
  }
  throw NumericError("train.step", text, advice_at(place));
}

void check_parameters(const Task& task, std::int64_t step) {
  const std::string bad = first_bad_parameter(task, [](const at::Tensor& parameter) {
    return parameter.requires_grad() ? parameter.detach() : at::Tensor();
  });
  if (bad.empty()) return;
  throw NumericError("train.save",
                     base::concat("parameter ", bad, " is not finite after step ", step,
                                  ": the model has diverged, and no checkpoint of it is saved"),
                     "a lower learning rate, and --resume with an earlier checkpoint");
}

}  // namespace cohort::train

// Values on the CPU are added without rounding, so that neither the order of steps nor their division among
// ranks changes a mean. Values on an accelerator are added there, in double, until somebody reads a mean.
#include "cohort/train/metrics.h"

#include <ATen/ATen.h>

namespace cohort::train {

Metric::Metric(std::string name, const at::Tensor& value, double weight)
    : name(std::move(name)), weight(weight) {
  // item() on an accelerator waits for all that was queued, so the value stays a tensor there.
  if (value.device().is_cpu()) {
    this->value = value.item<double>();
  } else {
    device_value = value.detach();
  }
}

MeterSet::Sum MeterSet::Sum::of(const ExactSum& weighted, double weight) {
  const std::vector<double> parts = weighted.parts();
  return {.weighted = parts.front(), .weight = weight, .rest = {parts.begin() + 1, parts.end()}};
}

ExactSum MeterSet::Sum::exact() const {
  ExactSum sum(rest);
  sum.add(weighted);
  return sum;
}

void MeterSet::add(const StepMetrics& metrics) {
  for (const Metric& metric : metrics) {
    Meter& meter = meters_[metric.name];
    meter.weight += metric.weight;
    if (metric.device_value.defined()) {
      // Added up on the device in double, as float sums of a long epoch lose digits. Nobody waits.
      at::Tensor weighted = metric.device_value.to(at::kDouble).mul(metric.weight);
      meter.pending = meter.pending.defined() ? meter.pending.add_(weighted) : weighted;
    } else {
      meter.weighted.add(metric.value * metric.weight);
    }
  }
}

void MeterSet::add(const std::map<std::string, Sum>& sums) {
  for (const auto& [name, sum] : sums) {
    Meter& meter = meters_[name];
    meter.weighted.add(sum.exact());
    meter.weight += sum.weight;
  }
}

// The one place that waits, called where numbers are shown or saved.
void MeterSet::add_pending() {
  for (auto& [name, meter] : meters_) {
    if (!meter.pending.defined()) continue;
    meter.weighted.add(meter.pending.item<double>());
    meter.pending.reset();
  }
}

std::map<std::string, double> MeterSet::averages() {
  add_pending();
  std::map<std::string, double> result;
  for (const auto& [name, meter] : meters_) {
    // A mean over samples: sums and weights are kept separately, so batches of any size and ranks can be
    // added.
    result[name] = meter.weight > 0 ? meter.weighted.value() / meter.weight : 0.0;
  }
  return result;
}

std::map<std::string, MeterSet::Sum> MeterSet::sums() {
  add_pending();
  std::map<std::string, Sum> result;
  for (const auto& [name, meter] : meters_) result[name] = Sum::of(meter.weighted, meter.weight);
  return result;
}

void MeterSet::restore(const std::map<std::string, Sum>& sums) {
  meters_.clear();
  for (const auto& [name, sum] : sums) {
    meters_[name].weighted = sum.exact();
    meters_[name].weight = sum.weight;
  }
}

}  // namespace cohort::train

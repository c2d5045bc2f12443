#include "cohort/train/internal/fit/buffers.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

namespace cohort::train {

void KeptBuffers::keep(const Task& task) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> found;
  for (const parallel::NamedModule& entry : task.modules()) {
    for (const at::Tensor& buffer : entry.module->buffers()) {
      if (!buffer.defined()) continue;
      // What repeats its elements in memory (expand()) cannot be written to, by a step neither. Sparse
      // tensors have no strides that could be asked for.
      const bool repeats =
          buffer.layout() == at::kStrided && at::has_internal_overlap(buffer) == at::MemOverlap::Yes;
      if (!repeats) found.push_back(buffer);
    }
  }
  // Mostly the same tensors as at the last step: their copies are then reused, and nothing is allocated.
  const bool are_same = std::ranges::equal(found, buffers_, [](const at::Tensor& a, const at::Tensor& b) {
    return a.is_same(b) && a.sizes() == b.sizes();
  });
  buffers_ = std::move(found);
  if (!are_same) {
    copies_.clear();
    for (const at::Tensor& buffer : buffers_) copies_.push_back(buffer.detach().clone());
  } else if (!buffers_.empty()) {
    at::_foreach_copy_(copies_, buffers_);
  }
}

void KeptBuffers::restore_unless_finite(const StepMetrics& metrics, const optim::NonFinite& gradients) {
  const c10::NoGradGuard no_grad;
  optim::NonFinite found = gradients;
  for (const Metric& metric : metrics) {
    // Only the loss decides. An accuracy of 0 / 0 does not make a step bad.
    if (metric.name != "loss") continue;
    found.add(metric.device_value.defined() ? optim::non_finite_scalar(metric.device_value)
                                            : optim::NonFinite{.on_cpu = !std::isfinite(metric.value)});
  }
  if (buffers_.empty()) return;
  if (found.on_cpu) return at::_foreach_copy_(buffers_, copies_);
  if (!found.on_device.defined()) return;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    // On the device the choice is made by where(), so the host does not wait for the flag.
    const at::Tensor left_out = found.on_device.to(buffers_[i].device()).ne(0);
    buffers_[i].copy_(at::where(left_out, copies_[i], buffers_[i]));
  }
}

}  // namespace cohort::train

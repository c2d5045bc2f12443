#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cohort/optim/finite.h"
#include "cohort/train/metrics.h"
#include "cohort/train/task.h"

namespace cohort::train {

/// The buffers of a task's modules (running statistics of batch norm) as they were before a step. Forward has
/// changed them before anybody knows whether the step will be left out, and one infinity makes a running mean
/// NaN for ever.
class KeptBuffers {
 public:
  /// Before the step: copies them.
  void keep(const Task& task);
  /// After it: restores them where the metric called "loss", or a gradient, is not finite. Does not wait for
  /// an accelerator.
  void restore_unless_finite(const StepMetrics& metrics, const optim::NonFinite& gradients);

 private:
  std::vector<at::Tensor> buffers_, copies_;
};

}  // namespace cohort::train

#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cohort/optim/groups.h"

/// Whether gradients are finite, asked between backward and the optimizer's step without waiting for an
/// accelerator:
///
///     const optim::NonFinite found = optim::find_non_finite(optimizer.param_groups());
///     optimizer.step_unless(found);  // leaves everything as it is where a gradient is infinite or NaN
namespace cohort::optim {

/// What is known of numbers that may not be finite: at once of those on the CPU, later of those elsewhere.
struct NonFinite {
  /// True if one on the CPU is not finite.
  bool on_cpu = false;
  /// A float scalar on an accelerator, 1 if a number there is not finite, else 0; undefined if there is none.
  at::Tensor on_device = {};

  /// True if one is not finite, wherever it is. Blocking: waits for the accelerator.
  bool any() const;
  /// Adds what `other` says.
  void add(const NonFinite& other);
};

/// Looks at every gradient of the groups. Reads each once and changes none.
NonFinite find_non_finite(const std::vector<ParamGroup>& groups);

/// The same for one scalar, such as a loss or a norm.
NonFinite non_finite_scalar(const at::Tensor& value);

}  // namespace cohort::optim

#pragma once

#include <vector>

#include "cohort/optim/finite.h"
#include "cohort/optim/optimizer.h"

/// Limits gradients in place, after backward and before the optimizer's step. With gradient accumulation:
/// once, after the last backward of the step.
namespace cohort::optim {

/// Scales all gradients together so that their norm is at most `max_norm`; returns the norm before that (0
/// when there is no gradient). The same numbers as torch.nn.utils.clip_grad_norm_. A norm that is not finite
/// makes the gradients NaN or zero as PyTorch does, unless `error_if_nonfinite`. Units: `norm_type` 1, 2, ...
/// or infinity. Throws: UsageError for a negative limit or a sparse gradient, or if the norm is not finite
/// and `error_if_nonfinite`; gradients have not changed then.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                       bool error_if_nonfinite = false);
/// The same over all groups together.
double clip_grad_norm_(const std::vector<ParamGroup>& groups, double max_norm, double norm_type = 2.0,
                       bool error_if_nonfinite = false);

/// The same with the 2-norm, and without waiting for an accelerator; says whether every gradient is finite.
/// Where one is not, no step may follow: gradients are then unchanged on the CPU, and NaN or zero elsewhere.
/// Finite gradients whose norm is beyond what their type holds (from 1.8e19 on in float) are clipped on the
/// CPU, and become zero elsewhere, as PyTorch makes them.
NonFinite clip_grad_norm_unless_non_finite_(const std::vector<ParamGroup>& groups, double max_norm);

/// Returns the norm of all gradients, changing nothing.
double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

/// Limits every element of every gradient to [-clip_value, clip_value]. Throws: UsageError for a negative
/// limit.
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

}  // namespace cohort::optim

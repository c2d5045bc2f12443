#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <vector>

/// Tensors that travel as one. Internal to this module.
namespace cohort::parallel {

/// Type and device: what tensors that lie in one must have in common.
std::string kind_of(const at::Tensor& tensor);

/// Views of `flat`, a [n], one after the other with the shapes of `like`, whose numels add up to n at most.
std::vector<at::Tensor> views_of(const at::Tensor& flat, std::span<const at::Tensor> like);

/// Writes gradient * scale to `out`, which has its type. `out` may be `gradient`. The
/// factor is not rounded to that type, as mul_(scale) rounds it: 1/3 in bfloat16 is 0.17 % too large.
void scale_into(const at::Tensor& out, const at::Tensor& gradient, double scale);

/// Numbers of all of them.
std::int64_t total_numel(std::span<const at::Tensor> tensors);

}  // namespace cohort::parallel

#pragma once

#include <ATen/core/Tensor.h>

namespace cohort::core {

/// Whether two elements of a tensor may lie in one place.
bool may_overlap(const at::Tensor& tensor);

/// Whether an element of `a` may lie where one of `b` does. Exact for tensors of one type and number of
/// dimensions with the same strides, such as parts of one tensor; for others true where the ranges of their
/// memory meet.
bool may_overlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace cohort::core

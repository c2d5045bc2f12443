#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace cohort::core {

/// Whether two elements of a tensor may lie in one place.
bool may_overlap(const at::Tensor& tensor);

/// Whether an element of `a` may lie where one of `b` does. Exact for tensors of one type and number of
/// dimensions with the same strides, such as parts of one tensor; for others true where the ranges of their
/// memory meet.
bool may_overlap(const at::Tensor& a, const at::Tensor& b);

/// Returns the first place of the tensor that stands at `place`: an earlier one where it stands there twice.
std::size_t first_place(const std::vector<at::Tensor>& tensors, std::size_t place);

}  // namespace cohort::core

#pragma once

#include <vector>

#include "cohort/script/internal/ir/tape.h"

/// Which gradients of results there are, and what follows for those of inputs and captured tensors.
namespace cohort::script {

/// Says which are defined.
std::vector<bool> defined(const Tensors& tensors);
bool is_none(const std::vector<bool>& is_given);
/// A gradient that no grad_output leads to is none, also where zeros stand for the grad_outputs that are
/// missing.
bool is_reached(const std::vector<bool>& reached_from, const std::vector<bool>& is_given);
/// A gradient that comes to a replay: dense, and neither lazily conjugate nor lazily negative. A sparse one
/// (that of an embedding) is spread out.
at::Tensor materialized(const at::Tensor& gradient);
/// True if materialized() gives a gradient zeros that eager mode does not multiply by: a sparse one, and
/// zeros without memory (those of sgn()). A dense zero times inf is NaN.
bool has_implicit_zeros(const Tensors& gradients);
/// False where an element is NaN or infinite, or where their sum is. Waits for a GPU.
bool all_finite(const Tensors& tensors);

}  // namespace cohort::script

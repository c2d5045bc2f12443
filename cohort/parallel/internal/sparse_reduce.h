#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>

#include "cohort/comm/group.h"

namespace cohort::parallel {

/// Returns sum_r(scale_r g_r) of sparse gradients that have other rows on each rank, coalesced, the same bits
/// everywhere: rows travel, padded to those of the rank that has most.
/// Shapes: `gradient` is a sparse COO tensor like `parameter`, or undefined: no rows.
/// Collective; blocks. Throws: what Group throws.
at::Tensor reduce_sparse(const comm::Group& group, const at::Tensor& gradient, const at::Tensor& parameter,
                         double scale, std::chrono::milliseconds timeout);

}  // namespace cohort::parallel

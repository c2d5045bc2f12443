#pragma once

#include <ATen/core/Tensor.h>

namespace cohort::ops {

/// Returns silu(gate) * up, the gate of a transformer's feed-forward part, in one pass over memory; backward
/// is one pass too, and keeps gate and up alone. As the operator cohort::swiglu it is known to LibTorch by
/// name. Shapes: gate and up alike, any; the result is contiguous. Dtypes: float32, float64, bfloat16
/// (computed in float32), alike; under autocast the widest of the two. Differentiable as often as one likes:
/// twice and more in LibTorch's operators. CPU only. Threads: computes on LibTorch's. Throws: UsageError for
/// other dtypes, or shapes or dtypes that differ. Source: Shazeer, "GLU Variants Improve Transformer", 2020.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace cohort::ops

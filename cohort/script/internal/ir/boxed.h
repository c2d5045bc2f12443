#pragma once

#include "cohort/script/internal/ir/tape.h"

namespace cohort::script {

inline constexpr auto kRandomKey = c10::DispatchKey::CustomRNGKeyId;  ///< core::RandomScope's

/// Returns a tensor of the same memory, sizes and strides, which may be given others.
at::Tensor shallow_copy(const at::Tensor& tensor);

/// How kernels are called.
struct KernelCallOptions {
  /// Operators that take a generator get the RandomScope's.
  bool in_random_scope = false;
  /// Tells LibTorch's profiler of each operator, as its dispatcher would.
  bool is_observed = false;
};

/// Runs `call` on `values`, by slot, over `stack`, and leaves its results there.
void run_boxed(const OperatorCall& call, const Tensors& values, torch::jit::Stack& stack,
               KernelCallOptions options = {});

}  // namespace cohort::script

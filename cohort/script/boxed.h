#pragma once

#include "cohort/script/tape.h"

namespace cohort::script {

/// Returns a tensor of the same memory, sizes and strides, which may be given others.
at::Tensor another_handle(const at::Tensor& tensor);

/// How kernels are called.
struct How {
  /// By the dispatch keys of arguments and thread, else by those that were recorded.
  bool find_kernels = false;
  /// Tells LibTorch's profiler of each operator, as its dispatcher would.
  bool is_observed = false;
};

/// Runs `call` on `values`, by slot, over `stack`, and leaves its results there.
void run_boxed(const Call& call, const Tensors& values, torch::jit::Stack& stack, How how = {});

}  // namespace cohort::script

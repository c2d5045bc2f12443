#pragma once

#include "cohort/script/tape.h"

namespace cohort::script {

/// Returns a tensor of the same memory, sizes and strides, which may be given others.
at::Tensor another_handle(const at::Tensor& tensor);

/// Runs `call` on `values`, by slot, over `stack`, and leaves its results there.
/// `find_kernel`: by the dispatch keys of its arguments and of the thread, else by those that were recorded.
void run_boxed(const Call& call, const Tensors& values, torch::jit::Stack& stack, bool find_kernel);

}  // namespace cohort::script

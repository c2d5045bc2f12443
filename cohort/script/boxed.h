#pragma once

#include "cohort/script/tape.h"

namespace cohort::script {

/// Runs `call` on `values`, by slot, over `stack`, and leaves its results there.
/// `find_kernel`: by the dispatch keys of its arguments and of the thread, else by those that were recorded.
void run_boxed(const Call& call, const Tensors& values, torch::jit::Stack& stack, bool find_kernel);

}  // namespace cohort::script

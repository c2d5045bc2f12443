#pragma once

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <vector>

#include "cohort/script/function.h"
#include "same_bits.h"

namespace cohort::test {

using Tensors = std::vector<at::Tensor>;
using Body = std::function<Tensors(const Tensors&)>;

/// Leaves blocks of the allocator that hold numbers which no test expects, so that a read of memory that
/// nobody filled shows.
inline void litter() {
  Tensors blocks;
  for (int numel = 1; numel <= 64; ++numel) {
    for (int i = 0; i < 3; ++i) blocks.push_back(at::full({numel}, 777.0 + i));
  }
}

/// Gradients of `leaves`, where results have a graph, for output gradients of ones.
inline Tensors gradients_of(const Tensors& results, const Tensors& leaves) {
  Tensors roots, grad_outputs;
  for (const at::Tensor& result : results) {
    if (!result.defined() || !result.requires_grad()) continue;
    roots.push_back(result);
    grad_outputs.push_back(at::ones(result.sizes(), result.options()));
  }
  if (roots.empty()) return {};
  return torch::autograd::grad(roots, leaves, grad_outputs, std::nullopt, false, /*allow_unused=*/true);
}

/// Calls `body` and its script in turn, each on inputs that `inputs(call)` makes anew, and expects the same
/// bits of results, inputs and gradients of `leaves`. Returns explain().
inline std::string expect_like_eager(const Body& body, const std::function<Tensors(int call)>& inputs,
                                     const Tensors& leaves = {}, int calls = 10) {
  script::Function fast(body, script::ScriptOptions().min_operators(0));
  for (int call = 0; call < calls; ++call) {
    const Tensors ours = inputs(call), theirs = inputs(call);
    at::manual_seed(call);
    litter();
    const Tensors expected = body(ours), expected_gradients = gradients_of(expected, leaves);
    at::manual_seed(call);
    litter();
    const Tensors found = fast(theirs), found_gradients = gradients_of(found, leaves);
    EXPECT_TRUE(same_bits(expected, found)) << "results of call " << call << "\n" << fast.explain();
    EXPECT_TRUE(same_bits(ours, theirs)) << "inputs of call " << call << "\n" << fast.explain();
    EXPECT_TRUE(same_bits(expected_gradients, found_gradients)) << "gradients of call " << call << "\n"
                                                                << fast.explain();
    if (::testing::Test::HasFailure()) break;
  }
  return fast.explain();
}

/// What `fn` throws, "" for nothing.
inline std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace cohort::test

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <vector>

#include "tests/support/gate.h"

namespace cohort::test {

/// Returns its argument. Its backward says that it has begun, and waits at the gate.
struct WaitsInBackward : torch::autograd::Function<WaitsInBackward> {
  static inline Gate* gate = nullptr;
  static inline std::atomic<bool> has_begun{false};

  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x + 0;
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* /*context*/,
                                          std::vector<at::Tensor> gradients) {
    has_begun = true;
    gate->wait();
    return gradients;
  }
};

}  // namespace cohort::test

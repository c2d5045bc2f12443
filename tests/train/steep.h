#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace cohort::test {

/// A layer whose loss is finite at every step, and whose gradient is not at one of them: d sqrt(0) is
/// infinite.
struct SteepImpl : torch::nn::Module {
  explicit SteepImpl(std::int64_t bad)
      : linear(register_module("linear", torch::nn::Linear(6, 6))),
        steep(register_parameter("steep", at::zeros({6}))),
        bad_step(bad) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = linear->forward(x);
    return is_training() && ++step == bad_step ? y + (steep * 0).sqrt() : y + steep;
  }
  torch::nn::Linear linear;
  at::Tensor steep;
  std::int64_t step = 0, bad_step;
};
TORCH_MODULE(Steep);

}  // namespace cohort::test

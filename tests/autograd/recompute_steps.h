#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <vector>

/// A small network, and steps with it that are compared bit by bit.
namespace cohort::test {

inline torch::nn::Sequential make_part(double dropout = 0.3) {
  return torch::nn::Sequential(torch::nn::Linear(6, 16), torch::nn::Tanh(), torch::nn::Dropout(dropout),
                               torch::nn::Linear(16, 6), torch::nn::ReLU());
}

inline at::Tensor input_of(bool requires_grad = true) {
  return at::arange(24, at::kFloat).view({4, 6}).sin().requires_grad_(requires_grad);
}

inline std::vector<at::Tensor> gradients_of(torch::nn::Sequential net) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : net->parameters()) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  net->zero_grad();
  return gradients;
}

inline void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    if (!a[i].defined()) continue;
    EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  }
}

/// The value, the gradients of `x` and `net`, and the next random number, of one step with `forward`.
template <typename Forward>
std::vector<at::Tensor> step(torch::nn::Sequential& net, at::Tensor x, const Forward& forward) {
  at::manual_seed(5);
  const at::Tensor value = forward(x);
  value.square().sum().backward();
  std::vector<at::Tensor> all = gradients_of(net);
  all.push_back(value.detach());
  all.push_back(x.grad());
  all.push_back(at::rand({3}));
  return all;
}

}  // namespace cohort::test

#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/utils.h>

#include <filesystem>
#include <iterator>
#include <vector>

#include "cohort/pipeline/pipeline.h"

/// Models for pipelines, and what they must equal: a plain loop over the micro-batches.
namespace cohort::pipeline::test {

/// Threads of this process.
inline std::ptrdiff_t num_threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                       std::filesystem::directory_iterator());
}

/// Placements of threads of their own on the machine's first two cores.
inline std::vector<base::Placement> placements(int count) {
  std::vector<base::Placement> all = base::parse_placements("cpu:0/a,cpu:1/a,cpu:0/b,cpu:1/b");
  all.resize(static_cast<std::size_t>(count));
  return all;
}

inline torch::nn::Sequential mlp(std::int64_t width = 24) {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(10, width), torch::nn::Tanh(),
                               torch::nn::Linear(width, width), torch::nn::ReLU(torch::nn::ReLUOptions(true)),
                               torch::nn::Linear(width, width), torch::nn::Sigmoid(),
                               torch::nn::Linear(width, 5));
}

inline torch::nn::Sequential conv_net() {
  torch::manual_seed(2);
  const auto conv = [](int in, int out) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1).bias(false));
  };
  const auto relu = [] { return torch::nn::ReLU(torch::nn::ReLUOptions(true)); };
  return torch::nn::Sequential(conv(3, 8), torch::nn::BatchNorm2d(8), relu(), conv(8, 16),
                               torch::nn::BatchNorm2d(16), relu(), torch::nn::MaxPool2d(2), conv(16, 16),
                               torch::nn::BatchNorm2d(16), relu(), torch::nn::AdaptiveAvgPool2d(1),
                               torch::nn::Flatten(), torch::nn::Linear(16, 5));
}

/// Layers [first, last) of `model`, shared with it.
inline torch::nn::Sequential part(const torch::nn::Sequential& model, std::size_t first, std::size_t last) {
  torch::nn::Sequential result;
  std::size_t i = 0;
  for (const torch::nn::AnyModule& layer : *model) {
    if (i >= first && i < last) result->push_back(layer);
    ++i;
  }
  return result;
}

/// `model` cut into stages at these layers.
inline std::vector<Stage> cut(const torch::nn::Sequential& model, const std::vector<std::size_t>& at) {
  std::vector<Stage> stages;
  std::size_t first = 0;
  for (const std::size_t last : at) {
    stages.emplace_back(part(model, first, last));
    first = last;
  }
  stages.emplace_back(part(model, first, model->size()));
  return stages;
}

inline void zero_grad(const Tensors& parameters) {
  for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
}

/// The gradients, and forgets them.
inline Tensors take_gradients(const Tensors& parameters) {
  Tensors gradients;
  for (const at::Tensor& parameter : parameters) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  zero_grad(parameters);
  return gradients;
}

inline void expect_same_bits(const Tensors& got, const Tensors& expected, const char* what = "gradient") {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), expected[i].defined()) << what << " " << i;
    EXPECT_TRUE(!got[i].defined() || at::equal(got[i], expected[i])) << what << " " << i;
  }
}

inline at::Tensor mse(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

/// What step() must do, on one thread.
template <typename Model>
at::Tensor plain_step(const Model& model, const at::Tensor& input, const at::Tensor& target,
                      const std::vector<std::int64_t>& sizes) {
  at::Tensor sum;
  std::int64_t first = 0;
  for (const std::int64_t size : sizes) {
    const at::Tensor loss = mse(model(input.narrow(0, first, size)), target.narrow(0, first, size)) *
                            (static_cast<double>(size) / static_cast<double>(input.size(0)));
    loss.backward();
    sum = sum.defined() ? sum + loss.detach() : loss.detach();
    first += size;
  }
  return sum;
}

/// Micro-batches over two placements of the CPU.
inline PipelineOptions two_placements(Schedule schedule = Schedule::kOneFOneB, std::int64_t split_size = 3) {
  PipelineOptions options;
  options.placements = placements(2);
  options.split_size = split_size;
  options.schedule = schedule;
  options.timeout = std::chrono::seconds(60);
  return options;
}

}  // namespace cohort::pipeline::test

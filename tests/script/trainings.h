#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/models/registry.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/autocast.h"
#include "cohort/optim/clip.h"
#include "cohort/optim/schedule.h"
#include "cohort/optim/sgd.h"
#include "cohort/script/step.h"
#include "nets.h"

/// Whole trainings, eager and scripted, with everything that a training loop does.
namespace cohort::script::trainings {

using cohort::test::cross_entropy;
using cohort::test::same_bits;
using Batches = std::vector<std::pair<at::Tensor, at::Tensor>>;

enum class Mode : std::uint8_t { kEager, kStep, kFunction };

struct Training {
  int steps = 100;
  bool adam = false;
  bool bf16 = false;
  at::Device device = at::kCPU;
};

inline constexpr double kMaxNorm = 1.0;

inline std::unique_ptr<optim::Optimizer> make_optimizer(Tensors parameters, bool adam) {
  if (adam) return std::make_unique<optim::AdamW>(std::move(parameters), optim::AdamWOptions(2e-3));
  return std::make_unique<optim::SGD>(std::move(parameters), optim::SGDOptions(0.05).momentum(0.9));
}

/// Weights averaged over steps, by operators of the user's own.
class Average {
 public:
  explicit Average(Tensors parameters) : parameters_(std::move(parameters)) {
    for (const at::Tensor& tensor : parameters_) average_.push_back(tensor.detach().clone());
  }
  void update() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < average_.size(); ++i) average_[i].mul_(0.95).add_(parameters_[i], 0.05);
  }
  const Tensors& average() const { return average_; }

 private:
  Tensors parameters_, average_;
};

struct Result {
  Tensors losses, state;
  std::string explained;
};

template <typename Make>
Result train(const Make& make, const Batches& batches, const Training& training, Mode mode) {
  at::manual_seed(1);
  auto model = make();
  model->to(training.device);
  const auto optimizer = make_optimizer(model->parameters(), training.adam);
  const auto schedule = optim::warmup(5, 0.1, optim::cosine(training.steps));
  Average average(model->parameters());
  const auto before_update = [&] { optim::clip_grad_norm_(model->parameters(), kMaxNorm); };
  auto step = script_step(model, cross_entropy, *optimizer, ScriptOptions(), before_update);
  auto fast = script(model);
  Result result;
  at::manual_seed(7);
  for (int i = 0; i < training.steps; ++i) {
    schedule->apply(*optimizer, i);
    const auto& batch = batches[static_cast<std::size_t>(i) % batches.size()];
    const at::Tensor x = batch.first.to(training.device), y = batch.second.to(training.device);
    std::optional<optim::Autocast> narrow;
    if (training.bf16) narrow.emplace(training.device.type(), at::kBFloat16);
    if (mode == Mode::kStep) {
      result.losses.push_back(step(x, y));
    } else {
      optimizer->zero_grad();
      const at::Tensor loss = cross_entropy(mode == Mode::kFunction ? fast(x) : model->forward(x), y);
      loss.backward();
      before_update();
      optimizer->step();
      result.losses.push_back(loss.detach());
    }
    average.update();
  }
  for (const at::Tensor& tensor : model->parameters()) {
    result.state.push_back(tensor.detach());
    result.state.push_back(tensor.grad());
  }
  for (const at::Tensor& tensor : model->buffers()) result.state.push_back(tensor);
  for (const at::Tensor& tensor : average.average()) result.state.push_back(tensor);
  result.state.push_back(at::rand({3}, training.device));  // where the generator stands
  result.explained = mode == Mode::kStep ? step.explain() : fast.explain();
  return result;
}

/// The bits of every loss, of parameters, gradients, buffers, of the averaged weights and of the generator
/// are the same.
template <typename Make>
void expect_same(const Make& make, const Batches& batches, const Training& training) {
  const Result eager = train(make, batches, training, Mode::kEager);
  for (const Mode mode : {Mode::kStep, Mode::kFunction}) {
    SCOPED_TRACE(mode == Mode::kStep ? "script_step" : "script(model)");
    const Result scripted = train(make, batches, training, mode);
    EXPECT_NE(scripted.explained.find("program: "), std::string::npos) << scripted.explained;
    EXPECT_EQ(scripted.explained.find("eager: "), std::string::npos) << scripted.explained;
    EXPECT_TRUE(same_bits(eager.losses, scripted.losses)) << scripted.explained;
    EXPECT_TRUE(same_bits(eager.state, scripted.state)) << scripted.explained;
  }
}

inline Batches batches_of(at::IntArrayRef size, std::int64_t targets) {
  at::manual_seed(3);
  Batches batches;
  for (int i = 0; i < 4; ++i) batches.emplace_back(at::randn(size), at::randint(0, 10, {targets}));
  return batches;
}

inline models::ModelOptions options_of(const char* name, std::int64_t channels, std::int64_t size,
                                       double width) {
  models::ModelOptions options;
  options.name = name;
  options.num_classes = 10;
  options.in_channels = channels;
  options.image_size = size;
  options.width = width;
  return options;
}

}  // namespace cohort::script::trainings

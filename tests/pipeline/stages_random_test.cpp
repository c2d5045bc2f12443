// What stages and losses draw.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <functional>
#include <optional>
#include <string>

#include "tests/pipeline/nets.h"

namespace cohort::pipeline {
namespace {

using namespace test;

// A model that draws in most of its layers.
torch::nn::Sequential dropout_net() {
  torch::manual_seed(9);
  return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::Dropout(0.5), torch::nn::Linear(16, 16),
                               torch::nn::Dropout(0.3), torch::nn::ReLU(), torch::nn::Linear(16, 4),
                               torch::nn::Dropout(0.2));
}

TEST(StagesTest, DropoutIsTheSameForAnyCutAndSchedule) {
  auto model = dropout_net();
  const at::Tensor input = torch::randn({8, 8}), target = torch::randn({8, 4});
  // The oracle: a loop with the generators of each micro-batch and layer.
  torch::manual_seed(11);
  core::RandomKey key = core::RandomKey::draw();
  std::uint64_t micro_batch = 0;
  const at::Tensor loss = plain_step(
      [&](at::Tensor x) {
        key.part = micro_batch++;
        key.layer = 0;
        for (const torch::nn::AnyModule& layer : *model) {
          const core::RandomScope scope(key);
          x = torch::nn::AnyModule(layer).forward(x);
          ++key.layer;
        }
        return x;
      },
      input, target, {3, 3, 2});
  const Tensors expected = take_gradients(model->parameters());
  struct Case {
    Schedule schedule;
    int num_placements;
    std::vector<std::size_t> cuts;
    bool recompute;
  };
  const std::vector<Case> cases{
      {Schedule::kFillDrain, 1, {}, false},          {Schedule::kOneFOneB, 2, {2}, false},
      {Schedule::kOneFOneB, 4, {1, 3, 4}, false},    {Schedule::kOneFOneB, 2, {3}, true},
      {Schedule::kInterleaved, 2, {1, 3, 6}, false}, {Schedule::kZeroBubble, 2, {4}, false}};
  for (const Case& each : cases) {
    SCOPED_TRACE(base::concat(to_string(each.schedule), " on ", each.num_placements));
    auto stages = cut(model, each.cuts);
    for (Stage& stage : stages) stage.recompute(each.recompute);
    PipelineOptions options = two_placements(each.schedule);
    options.placements = placements(each.num_placements);
    Pipeline pipe(stages, options);
    torch::manual_seed(11);
    EXPECT_TRUE(at::equal(pipe.step(input, target, mse), loss));
    expect_same_bits(take_gradients(model->parameters()), expected);
    EXPECT_FALSE(at::equal(pipe.step(input, target, mse), loss)) << "the next step draws others";
    torch::manual_seed(11);
    const at::Tensor output = pipe.forward(input);
    torch::manual_seed(11);
    EXPECT_TRUE(at::equal(output, pipe.forward(input)));
    zero_grad(model->parameters());
  }
}

// Within a scope of the caller, whatever state the process's generator has, and outside of one.
TEST(StagesTest, TheLossDrawsNumbersOfItsMicroBatch) {
  auto model = dropout_net();
  const at::Tensor input = torch::randn({8, 8}), target = torch::randn({8, 4});
  struct Result {
    at::Tensor loss;
    Tensors gradients;
    std::vector<float> drawn;  // by the loss, of each micro-batch
  };
  const auto run = [&](Schedule schedule, std::uint64_t seed, bool in_scope) {
    Pipeline pipe(cut(model, {3}), two_placements(schedule));
    const auto drawn = std::make_shared<std::vector<float>>();
    torch::manual_seed(seed);
    std::optional<core::RandomScope> scope;
    if (in_scope) scope.emplace(core::RandomKey{.seed = 7});
    const at::Tensor loss =
        pipe.step(input, target, [drawn](const at::Tensor& output, const at::Tensor& wanted) {
          drawn->push_back(torch::rand({1}).item<float>());
          return mse(at::dropout(output, 0.5, true), wanted);
        });
    return Result{loss, take_gradients(model->parameters()), *drawn};
  };
  for (const bool in_scope : {true, false}) {
    const Result first = run(Schedule::kOneFOneB, 1, in_scope);
    ASSERT_EQ(first.drawn.size(), 3U);
    EXPECT_NE(first.drawn[0], first.drawn[1]);
    EXPECT_NE(first.drawn[1], first.drawn[2]);
    for (const Schedule& schedule : {Schedule::kFillDrain, Schedule::kOneFOneB, Schedule::kZeroBubble}) {
      const Result other = run(schedule, in_scope ? 2 : 1, in_scope);
      EXPECT_TRUE(at::equal(other.loss, first.loss)) << to_string(schedule) << in_scope;
      EXPECT_EQ(other.drawn, first.drawn);
      expect_same_bits(other.gradients, first.gradients);
    }
    EXPECT_EQ(at::equal(run(Schedule::kOneFOneB, 2, in_scope).loss, first.loss), in_scope);
  }
}

// Draws in evaluation, too.
struct NoiseImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + torch::randn(x.sizes()); }
};
TORCH_MODULE(Noise);

TEST(StagesTest, WhatAStageDrawsInEvaluationIsWhatItsCallerWouldDraw) {
  torch::nn::Sequential model(torch::nn::Linear(4, 4), Noise(), torch::nn::Linear(4, 2));
  model->eval();
  const at::Tensor input = torch::randn({8, 4});
  const auto plain = [&] {
    Tensors outputs;
    for (const at::Tensor& part : input.split(3)) outputs.push_back(model->forward(part));
    return at::cat(outputs);
  };
  const auto piped = [&](std::size_t at) {
    Pipeline pipe(cut(model, {at}), two_placements());
    return pipe.forward(input);
  };
  // The output, what the scope draws next, and what the program draws after it.
  const auto in_scope = [](std::optional<core::RandomKey> key, const std::function<at::Tensor()>& run) {
    torch::manual_seed(1);
    Tensors all;
    {
      std::optional<core::RandomScope> scope;
      if (key) scope.emplace(*key);
      all = {run().detach(), torch::rand({2})};
    }
    all.push_back(torch::rand({2}));
    return all;
  };
  const core::RandomKey key{.seed = 5};
  EXPECT_FALSE(at::equal(in_scope(key, plain)[0], in_scope(std::nullopt, plain)[0]));
  for (const std::size_t at : {1, 2}) {
    for (const auto& each : {std::optional<core::RandomKey>(key), std::optional<core::RandomKey>()}) {
      expect_same_bits(in_scope(each, [&] { return piped(at); }), in_scope(each, plain), "number");
    }
  }
}

}  // namespace
}  // namespace cohort::pipeline

#include "cohort/script/step.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "cohort/core/error.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/clip.h"
#include "cohort/optim/sgd.h"
#include "nets.h"
#include "tests/support/throws.h"

namespace cohort::script {
namespace {

using test::cross_entropy;
using test::same_bits;

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(Tensors)>;

std::unique_ptr<optim::Optimizer> sgd(Tensors parameters) {
  return std::make_unique<optim::SGD>(std::move(parameters), optim::SGDOptions(0.05).momentum(0.9));
}
std::unique_ptr<optim::Optimizer> adam(Tensors parameters) {
  return std::make_unique<optim::Adam>(std::move(parameters));
}

struct Trained {
  std::vector<at::Tensor> losses, state;
  std::string explained;
};

// Trains on batches that differ from step to step, with a learning rate that does too.
template <typename Make>
Trained train(const Make& make, const MakeOptimizer& make_optimizer, int steps, bool scripted,
              const std::vector<std::pair<at::Tensor, at::Tensor>>& batches, double max_norm = 0) {
  at::manual_seed(1);
  auto model = make();
  const auto optimizer = make_optimizer(model->parameters());
  const auto clip = [&] {
    if (max_norm > 0) optim::clip_grad_norm_(model->parameters(), max_norm);
  };
  auto step = script_step(model, cross_entropy, *optimizer, ScriptOptions(), clip);
  Trained result;
  at::manual_seed(7);
  for (int i = 0; i < steps; ++i) {
    optimizer->set_lr(0.05 / (1 + i));
    const auto& [x, y] = batches[static_cast<std::size_t>(i) % batches.size()];
    if (scripted) {
      result.losses.push_back(step(x, y));
    } else {
      optimizer->zero_grad();
      const at::Tensor loss = cross_entropy(model->forward(x), y);
      loss.backward();
      clip();
      optimizer->step();
      result.losses.push_back(loss.detach());
    }
  }
  for (const at::Tensor& tensor : model->parameters()) {
    result.state.push_back(tensor.detach().clone());
    result.state.push_back(tensor.grad().defined() ? tensor.grad().clone() : at::empty({0}));
  }
  for (const at::Tensor& tensor : model->buffers()) result.state.push_back(tensor.clone());
  result.state.push_back(at::rand({3}));  // where the generator stands
  result.explained = step.explain();
  return result;
}

std::vector<std::pair<at::Tensor, at::Tensor>> batches_of(at::IntArrayRef size, std::int64_t targets) {
  at::manual_seed(3);
  std::vector<std::pair<at::Tensor, at::Tensor>> batches;
  for (int i = 0; i < 4; ++i) batches.emplace_back(at::randn(size), at::randint(0, 10, {targets}));
  return batches;
}

template <typename Make>
void expect_same(const Make& make, const MakeOptimizer& optimizer, int steps,
                 const std::vector<std::pair<at::Tensor, at::Tensor>>& batches, double max_norm = 0) {
  const Trained eager = train(make, optimizer, steps, false, batches, max_norm);
  const Trained scripted = train(make, optimizer, steps, true, batches, max_norm);
  EXPECT_NE(scripted.explained.find("program:"), std::string::npos) << scripted.explained;
  EXPECT_TRUE(same_bits(eager.losses, scripted.losses)) << scripted.explained;
  EXPECT_TRUE(same_bits(eager.state, scripted.state)) << scripted.explained;
}

TEST(StepTest, MlpWithBatchNormAndDropoutTrainsBitForBitAsEager) {
  expect_same([] { return test::small_mlp(); }, sgd, 100, batches_of({16, 32}, 16));
  expect_same([] { return test::small_mlp(); }, adam, 100, batches_of({16, 32}, 16), /*max_norm=*/0.5);
}

TEST(StepTest, ConvNetTrainsBitForBitAsEager) {
  expect_same([] { return test::small_conv_net(); }, sgd, 100, batches_of({8, 3, 16, 16}, 8));
}

TEST(StepTest, LstmTrainsBitForBitAsEager) {
  std::vector<std::pair<at::Tensor, at::Tensor>> batches;
  at::manual_seed(3);
  for (int i = 0; i < 3; ++i) {
    const at::Tensor tokens = at::randint(0, 50, {4, 12});
    batches.emplace_back(tokens, tokens.view(-1));
  }
  expect_same([] { return test::Tagger(); }, adam, 100, batches);
}

TEST(StepTest, TransformerLayerTrainsBitForBitAsEager) {
  expect_same([] { return test::Encoder(); }, adam, 100, batches_of({6, 4, 32}, 24), /*max_norm=*/1.0);
}

TEST(StepTest, ResidualNetTrainsBitForBitAsEager) {
  expect_same([] { return test::Residual(); }, sgd, 20, batches_of({4, 3, 12, 12}, 4));
}

TEST(StepTest, ALastShortBatchHasAProgramOfItsOwn) {
  auto batches = batches_of({16, 32}, 16);
  batches.push_back({batches[0].first.slice(0, 0, 5), batches[0].second.slice(0, 0, 5)});
  const Trained scripted = train([] { return test::small_mlp(); }, sgd, 30, true, batches);
  EXPECT_NE(scripted.explained.find("2 of 8 programs"), std::string::npos) << scripted.explained;
  expect_same([] { return test::small_mlp(); }, sgd, 30, batches);
}

TEST(StepTest, Bf16AutocastTrainsBitForBitAsEager) {
  const bool before = at::autocast::is_autocast_enabled(at::kCPU);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_cache_enabled(false);
  expect_same([] { return test::small_mlp(); }, sgd, 20, batches_of({16, 32}, 16));
  at::autocast::set_autocast_cache_enabled(true);
  at::autocast::set_autocast_enabled(at::kCPU, before);
}

TEST(StepTest, TorchOptimizersWorkToo) {
  at::manual_seed(1);
  auto model = test::small_mlp();
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05));
  auto step = script_step(model, cross_entropy, optimizer);
  const auto batches = batches_of({16, 32}, 16);
  for (int i = 0; i < 10; ++i) step(batches[0].first, batches[0].second);
  EXPECT_NE(step.explain().find("program:"), std::string::npos) << step.explain();
}

TEST(StepTest, HooksOnParametersAndParametersNobodyStepsStayEager) {
  const auto batches = batches_of({16, 32}, 16);
  const auto [x, y] = batches[0];
  auto model = test::small_mlp();
  const auto optimizer = sgd(model->parameters());
  int fired = 0;
  model->parameters()[0].register_hook([&](const at::Tensor& gradient) {
    ++fired;
    return gradient;
  });
  auto step = script_step(model, cross_entropy, *optimizer);
  for (int i = 0; i < 5; ++i) step(x, y);
  EXPECT_EQ(fired, 5);
  EXPECT_NE(step.explain().find("has a hook"), std::string::npos) << step.explain();

  auto other = test::small_mlp();
  Tensors some = other->parameters();
  some.pop_back();
  const auto partial = sgd(some);
  auto partial_step = script_step(other, cross_entropy, *partial);
  for (int i = 0; i < 5; ++i) partial_step(x, y);
  EXPECT_NE(partial_step.explain().find("is not the optimizer's"), std::string::npos)
      << partial_step.explain();
}

TEST(StepTest, NeedsGradients) {
  auto model = test::small_mlp();
  const auto optimizer = sgd(model->parameters());
  auto step = script_step(model, cross_entropy, *optimizer);
  const auto batches = batches_of({16, 32}, 16);
  const at::NoGradGuard no_grad;
  COHORT_EXPECT_THROW_WITH(step(batches[0].first, batches[0].second), UsageError, "needs gradients");
}

}  // namespace
}  // namespace cohort::script

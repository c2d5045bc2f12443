#include "cohort/script/step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "cohort/base/error.h"
#include "cohort/optim/sgd.h"
#include "nets.h"
#include "tests/support/throws.h"

namespace cohort::script {
namespace {

using test::cross_entropy;
using test::same_bits;

std::unique_ptr<optim::Optimizer> sgd(Tensors parameters) {
  return std::make_unique<optim::SGD>(std::move(parameters), optim::SGDOptions(0.05).momentum(0.9));
}

struct Trained {
  std::vector<at::Tensor> losses, state;
  std::string explained;
};

using Batches = std::vector<std::pair<at::Tensor, at::Tensor>>;

// Trains on batches that differ from step to step.
Trained train(int steps, bool scripted, const Batches& batches) {
  at::manual_seed(1);
  auto model = test::small_mlp();
  const auto optimizer = sgd(model->parameters());
  auto step = script_step(model, cross_entropy, *optimizer);
  Trained result;
  at::manual_seed(7);
  for (int i = 0; i < steps; ++i) {
    const auto& [x, y] = batches[static_cast<std::size_t>(i) % batches.size()];
    if (scripted) {
      result.losses.push_back(step(x, y));
    } else {
      optimizer->zero_grad();
      const at::Tensor loss = cross_entropy(model->forward(x), y);
      loss.backward();
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

Batches batches_of(at::IntArrayRef size, std::int64_t targets) {
  at::manual_seed(3);
  Batches batches;
  for (int i = 0; i < 4; ++i) batches.emplace_back(at::randn(size), at::randint(0, 10, {targets}));
  return batches;
}

TEST(StepTest, ALastShortBatchHasAProgramOfItsOwn) {
  auto batches = batches_of({16, 32}, 16);
  batches.push_back({batches[0].first.slice(0, 0, 5), batches[0].second.slice(0, 0, 5)});
  const Trained eager = train(30, false, batches), scripted = train(30, true, batches);
  EXPECT_NE(scripted.explained.find("2 of 8 programs"), std::string::npos) << scripted.explained;
  EXPECT_TRUE(same_bits(eager.losses, scripted.losses)) << scripted.explained;
  EXPECT_TRUE(same_bits(eager.state, scripted.state)) << scripted.explained;
}

TEST(StepTest, ExplainSpeaksOfAStepAndOfNoForward) {
  const auto batches = batches_of({16, 32}, 16);
  const std::string text = train(3, true, batches).explained;
  EXPECT_EQ(text.find("step: 1 of 8 programs\n"), 0U) << text;
  EXPECT_NE(text.find(" operators recorded, "), std::string::npos) << text;
  EXPECT_NE(text.find("; 1 call; "), std::string::npos) << text;
  for (const char* of_a_function : {"of forward", "saved for backward"}) {
    EXPECT_EQ(text.find(of_a_function), std::string::npos) << text;
  }
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

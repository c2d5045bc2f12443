#include "cohort/core/random_scope.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/rnn.h>

#include <functional>
#include <map>
#include <string>
#include <thread>

namespace cohort::core {
namespace {

namespace nn = torch::nn;

const std::map<std::string, std::function<at::Tensor()>>& operators() {
  static const at::Tensor ones = at::ones({4, 8});
  static const auto attention = [](bool gradient) {
    const at::Tensor q = at::ones({1, 2, 4, 8}).requires_grad_(gradient);
    return at::scaled_dot_product_attention(q, q, q, {}, 0.5).detach();
  };
  static const std::map<std::string, std::function<at::Tensor()>> all{
      {"dropout", [] { return at::dropout(ones, 0.5, true); }},
      {"dropout with gradient",
       [] { return at::dropout(ones.clone().requires_grad_(), 0.5, true).detach(); }},
      {"dropout of bfloat16", [] { return at::dropout(ones.to(at::kBFloat16), 0.5, true); }},
      {"dropout in place",
       [] {
         at::Tensor values = at::ones({4, 8});
         return at::dropout_(values, 0.5, true);
       }},
      {"dropout2d", [] { return at::feature_dropout(at::ones({2, 6, 4, 4}), 0.5, true); }},
      {"alpha dropout", [] { return at::alpha_dropout(ones, 0.5, true); }},
      {"rrelu", [] { return at::rrelu(-ones, 0.1, 0.3, true); }},
      {"gumbel", [] { return nn::functional::gumbel_softmax(ones); }},
      {"rand", [] { return at::rand({5}); }},
      {"randn_like", [] { return at::randn_like(ones); }},
      {"randint", [] { return at::randint(1000, {5}); }},
      {"randperm", [] { return at::randperm(30); }},
      {"normal", [] { return at::normal(0.0, ones); }},
      {"bernoulli", [] { return at::bernoulli(ones * 0.5); }},
      {"multinomial", [] { return at::multinomial(ones, 3); }},
      {"exponential_", [] { return at::empty({4}).exponential_(); }},
      {"poisson", [] { return at::poisson(ones); }},
      {"attention", [] { return attention(false); }},
      {"attention with gradient", [] { return attention(true); }},
      {"dropout between layers of an LSTM",
       [] {
         at::NoGradGuard no_grad;
         static nn::LSTM lstm(nn::LSTMOptions(8, 8).num_layers(2).dropout(0.5));
         return std::get<0>(lstm->forward(at::ones({3, 2, 8})));
       }},
  };
  return all;
}

at::Tensor next_global() {
  return at::rand({2});
}

TEST(RandomScopeTest, OperatorsDrawFromTheKeyAndLeaveTheGlobalGeneratorAlone) {
  for (const auto& [name, draw] : operators()) {
    draw();  // whatever is made once
    at::manual_seed(1);
    const at::Tensor global = next_global();
    at::manual_seed(1);
    std::vector<at::Tensor> drawn;
    for (const std::uint64_t part : {3, 3, 4}) {
      const RandomScope scope(RandomKey{.seed = 7, .step = 2, .part = part});
      drawn.push_back(draw());
    }
    EXPECT_TRUE(at::equal(drawn[0], drawn[1])) << name;
    EXPECT_FALSE(at::equal(drawn[0], drawn[2])) << name;
    EXPECT_TRUE(at::equal(next_global(), global)) << name;
  }
}

TEST(RandomScopeTest, EveryFieldOfTheKeyCounts) {
  const RandomKey key{.seed = 1, .step = 2, .rank = 3, .part = 4, .layer = 5};
  std::vector<RandomKey> changed(5, key);
  changed[0].seed++, changed[1].step++, changed[2].rank++, changed[3].part++, changed[4].layer++;
  for (const RandomKey& changed_key : changed) EXPECT_NE(changed_key.generator_seed(), key.generator_seed());
  EXPECT_EQ(key.generator_seed(), RandomKey(key).generator_seed());
  EXPECT_EQ(key.generator_seed(), 9126499083986997651u) << "a promise: checkpoints resume on it";
}

TEST(RandomScopeTest, CallsWithinAScopeContinueAndScopesNest) {
  const RandomKey key{.seed = 5};
  const auto two = [&] {
    const RandomScope scope(key);
    const at::Tensor numbers = at::rand({3});
    return std::pair(numbers, at::rand({3}));
  };
  const auto [first, second] = two();
  EXPECT_FALSE(at::equal(first, second));
  const RandomScope scope(key);
  EXPECT_TRUE(at::equal(at::rand({3}), first));
  {
    const RandomScope inner(key);
    EXPECT_TRUE(at::equal(at::rand({3}), first));
    at::manual_seed(9);
    const RandomScope none{at::Generator()};
    const at::Tensor global = at::rand({3});
    at::manual_seed(9);
    EXPECT_TRUE(at::equal(at::rand({3}), global));
  }
  EXPECT_TRUE(at::equal(at::rand({3}), second)) << "the outer one continues where it was";
  EXPECT_TRUE(RandomScope::current().defined());
}

TEST(RandomScopeTest, AGeneratorThatIsGivenIsKept) {
  const auto own = [] { return at::make_generator<at::CPUGeneratorImpl>(3); };
  const at::Tensor expected = at::rand({3}, own());
  const RandomScope scope(RandomKey{.seed = 5});
  EXPECT_TRUE(at::equal(at::rand({3}, own()), expected));
}

TEST(RandomScopeTest, IsTheThreadsOwn) {
  const RandomScope scope(RandomKey{.seed = 5});
  std::thread([] { EXPECT_FALSE(RandomScope::current().defined()); }).join();
  // Two threads at once draw what each would draw alone.
  std::vector<at::Tensor> drawn(2), expected(2);
  const auto draw = [](std::uint64_t part) {
    const RandomScope own(RandomKey{.seed = 5, .part = part});
    at::Tensor sum = at::zeros({64});
    for (int i = 0; i < 50; ++i) sum += at::rand({64});
    return sum;
  };
  for (std::size_t i = 0; i < 2; ++i) expected[i] = draw(i);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 2; ++i) threads.emplace_back([&, i] { drawn[i] = draw(i); });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(drawn[i], expected[i]));
}

TEST(RandomScopeTest, KeysAreDrawnFromWhateverTheThreadDrawsFrom) {
  at::manual_seed(4);
  const RandomKey first = RandomKey::draw(), second = RandomKey::draw();
  EXPECT_NE(first.seed, second.seed);
  at::manual_seed(4);
  EXPECT_EQ(RandomKey::draw().seed, first.seed);
  const auto within = [&] {
    const RandomScope scope(first);
    return RandomKey::draw().seed;
  };
  EXPECT_EQ(within(), within());
  EXPECT_EQ(RandomKey::draw().seed, second.seed) << "drawn within a scope, the global one stays";
}

TEST(RandomScopeTest, WhatStandsForTheGlobalGeneratorDoesSoInScopesWithin) {
  const at::Generator global = at::detail::getDefaultCPUGenerator();
  const auto substitute = [] { return at::make_generator<at::CPUGeneratorImpl>(5); };
  const auto draw = [&](at::Generator scope) {
    const RandomScope outer(std::move(scope), substitute());
    at::Tensor found = at::empty({4}).uniform_(0, 1, global);
    const RandomScope inner{at::Generator()};
    const auto key = static_cast<double>(RandomKey::draw().seed % 1000);
    return at::stack({found, at::empty({4}).uniform_(0, 1, global), at::rand({4}), at::full({4}, key)});
  };
  at::manual_seed(1);
  const at::Tensor first = draw({}), second = draw(substitute());
  EXPECT_TRUE(at::equal(first, second));
  at::manual_seed(1);
  const at::Tensor untouched = at::rand({4});
  at::manual_seed(1);
  draw({});
  EXPECT_TRUE(at::equal(at::rand({4}), untouched));
}

}  // namespace
}  // namespace cohort::core

#include "cohort/script/internal/record/guard.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/core/random_scope.h"
#include "cohort/optim/autocast.h"
#include "cohort/script/script.h"
#include "tests/script/nets.h"
#include "tests/support/contains.h"
#include "tests/support/throws.h"

namespace cohort::script {
namespace {

namespace nn = torch::nn;
using test::contains;
using test::same_bits;

TEST(InputGuardTest, NoticesTypeSizesStridesGradientAndSharedMemory) {
  const at::Tensor a = at::ones({4, 4}), b = at::ones({4, 4});
  const InputGuard guard(Tensors{a, b});
  EXPECT_TRUE(guard.holds(Tensors{at::zeros({4, 4}), b}));
  EXPECT_FALSE(guard.holds(Tensors{a}));
  EXPECT_FALSE(guard.holds(Tensors{a.to(at::kDouble), b}));
  EXPECT_FALSE(guard.holds(Tensors{a.slice(0, 0, 3), b}));
  EXPECT_FALSE(guard.holds(Tensors{at::ones({4, 4}).t(), b}));
  EXPECT_FALSE(guard.holds(Tensors{at::ones({4, 4}).requires_grad_(), b}));
  EXPECT_FALSE(guard.holds(Tensors{a, a}));
  EXPECT_FALSE(guard.holds(Tensors{at::Tensor(), b}));
  const InputGuard same(Tensors{a, a});
  EXPECT_TRUE(same.holds(Tensors{b, b}));
  EXPECT_FALSE(same.holds(Tensors{a, b}));
}

// Such an input keeps the function eager: one guard knows it again, and no call throws.
TEST(GuardTest, InputsThatAreNotStridedAreKnownAgain) {
  const at::Tensor dense = torch::tensor({{1.F, 0.F, 2.F}, {0.F, 0.F, 3.F}});
  const std::vector<at::Tensor> inputs = {
      dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(),
      at::_nested_tensor_from_tensor_list({at::ones({2, 3}), at::ones({1, 3})})};
  for (const at::Tensor& other : inputs) {
    auto fast = script([](const at::Tensor& x, const at::Tensor& y) { return x.values().sum() * y.sum(); },
                       ScriptOptions().min_operators(0));
    const at::Tensor input = other.is_sparse() ? other.coalesce() : other;
    for (int call = 0; call < 12; ++call) {
      const at::Tensor y = at::full({2}, call + 1.F);
      EXPECT_EQ(fast(input, y).item<float>(), input.values().sum().item<float>() * 2 * (call + 1.F));
    }
    const std::string text = fast.explain();
    EXPECT_EQ(text.find("  inputs: "), text.rfind("  inputs: ")) << "one guard:\n" << text;
    EXPECT_EQ(fast(dense.to_sparse().coalesce(), at::ones({2})).item<float>(), 12);
  }
}

// They have no values to compare recordings by.
TEST(GuardTest, TensorsOnTheMetaDeviceKeepTheFunctionEager) {
  auto outside =
      script([](const at::Tensor& x) { return x.mul(x).add(1); }, ScriptOptions().min_operators(0));
  auto within = script(
      [](const at::Tensor& x) {
        const at::Tensor shape = at::empty({3, 4}, x.options().device(at::kMeta));
        return x.mul(x) * static_cast<double>(shape.mm(shape.t()).size(1));
      },
      ScriptOptions().min_operators(0));
  for (int call = 0; call < 5; ++call) {
    const at::Tensor x = at::empty({2, 3}, at::TensorOptions(at::kMeta)).requires_grad_();
    const at::Tensor y = outside(x);
    EXPECT_TRUE(y.is_meta());
    EXPECT_EQ(y.sizes(), x.sizes());
    y.sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    EXPECT_EQ(within(at::full({2}, call + 1.F)).sum().item<float>(), 6 * (call + 1.F) * (call + 1.F));
  }
  for (const std::string& text : {outside.explain(), within.explain()}) {
    EXPECT_NE(text.find("on the meta device"), std::string::npos) << text;
  }
}

// It has a storage, and no memory.
TEST(GuardTest, ZeroTensorsKeepTheFunctionEager) {
  auto outside =
      script([](const at::Tensor& x) { return x.mul(3).add(1).sum(); }, ScriptOptions().min_operators(0));
  auto within = script(
      [](const at::Tensor& x) { return x.mul(at::_efficientzerotensor({2}, x.options())).add(1).sum(); },
      ScriptOptions().min_operators(0));
  for (int call = 0; call < 8; ++call) {
    EXPECT_EQ(outside(at::_efficientzerotensor({2}, at::kFloat)).item<float>(), 2);
    EXPECT_EQ(within(at::full({2}, call + 1.F)).item<float>(), 2);
  }
  EXPECT_NE(outside.explain().find("zero tensor, which has no memory"), std::string::npos)
      << outside.explain();
  for (int call = 0; call < 8; ++call) EXPECT_EQ(outside(at::full({2}, 2.F)).item<float>(), 14);
}

TEST(GuardTest, WhatReadsBeyondItsInputHasAProgramForEachPlaceInAStorage) {
  const at::NoGradGuard no_grad;
  const auto beyond = [](const at::Tensor& x) { return x.as_strided({8}, {1}, 0) + 1; };
  const auto beyond_a_view = [](const at::Tensor& x) { return x.view({2, 2}).as_strided({8}, {1}, 0) + 1; };
  const at::Tensor memory = at::arange(16.0);
  const at::Tensor first = memory.narrow(0, 0, 4), later = memory.narrow(0, 3, 4);
  const at::Tensor small = at::zeros({4});
  const auto check = [&](auto fn) {
    auto fast = script(fn);
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(same_bits(fast(first), fn(first)));
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(same_bits(fast(later), fn(later)));
    EXPECT_THROW(fast(small), c10::Error);  // its storage holds no eight
    EXPECT_TRUE(same_bits(fast(first), fn(first)));
  };
  check(beyond);
  check(beyond_a_view);
}

TEST(GuardTest, InputsThatShareMemoryHaveAProgramOfTheirOwn) {
  const at::NoGradGuard no_grad;
  const auto fn = [](const at::Tensor& a, const at::Tensor& b) {
    a.add_(1);
    return a + b;
  };
  auto fast = script(fn);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(fast(at::ones({2}), at::ones({2}))[0].item<float>(), 3);
    const at::Tensor both = at::ones({2});
    EXPECT_EQ(fast(both, both)[0].item<float>(), 4);
  }
  EXPECT_TRUE(contains(fast.explain(), "2 of 8 programs")) << fast.explain();
}

TEST(GuardTest, ModesOfTheThreadHaveProgramsOfTheirOwn) {
  at::manual_seed(1);
  auto model = test::small_mlp();
  model->eval();
  auto fast = script(model);
  const at::Tensor x = at::randn({16, 32});
  const at::Tensor expected = model->forward(x).detach();
  for (int i = 0; i < 4; ++i) {
    fast(x).sum().backward();
    {
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(same_bits(fast(x), expected));
    }
    {
      const c10::InferenceMode inference;
      EXPECT_TRUE(same_bits(fast(x), model->forward(x)));
    }
    {
      const optim::Autocast narrow(at::kCPU, at::kBFloat16);
      const at::Tensor y = fast(x);
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      EXPECT_TRUE(same_bits(y, model->forward(x)));
      y.sum().backward();
    }
  }
  EXPECT_TRUE(contains(fast.explain(), "4 of 8 programs")) << fast.explain();
  EXPECT_FALSE(contains(fast.explain(), "eager")) << fast.explain();
}

// Whether autocast keeps the casts of weights, until the end of the scope.
class AutocastCache {
 public:
  explicit AutocastCache(bool is_enabled) : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(is_enabled);
  }
  ~AutocastCache() { at::autocast::set_autocast_cache_enabled(before_); }
  AutocastCache(const AutocastCache&) = delete;
  AutocastCache& operator=(const AutocastCache&) = delete;

 private:
  bool before_;
};

// Eager mode keeps the cast of a weight for the second call, and sums the gradients of both in bfloat16.
TEST(GuardTest, EachCallWithinAScopeOfAutocastCastsItsWeights) {
  at::manual_seed(1);
  nn::Sequential model(nn::Linear(16, 32), nn::Tanh(), nn::Linear(32, 8));
  auto fast = script(model);
  const auto eager = [&](const at::Tensor& x) { return model->forward(x); };
  const auto gradients_of_calls = [&](auto& fn, const Tensors& inputs) {
    for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
    Tensors outputs;
    {
      const optim::Autocast narrow(at::kCPU, at::kBFloat16);
      for (const at::Tensor& x : inputs) outputs.push_back(fn(x));
    }
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& y : outputs) loss = loss + y.to(at::kFloat).square().sum();
    loss.backward();
    Tensors gradients;
    for (const at::Tensor& parameter : model->parameters()) gradients.push_back(parameter.grad());
    return gradients;
  };
  for (int i = 0; i < 4; ++i) gradients_of_calls(fast, {at::randn({4, 16})});
  ASSERT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
  for (int i = 0; i < 6; ++i) {
    const Tensors inputs = {at::randn({4, 16}), at::randn({4, 16})};
    const Tensors found = gradients_of_calls(fast, inputs);
    Tensors uncached, cached;
    {
      const AutocastCache cache(false);
      uncached = gradients_of_calls(eager, inputs);
    }
    {
      const AutocastCache cache(true);
      cached = gradients_of_calls(eager, inputs);
    }
    EXPECT_TRUE(same_bits(found, uncached)) << i << "\n" << fast.explain();
    EXPECT_FALSE(same_bits(uncached, cached)) << "the cache makes no difference: this test shows nothing";
    ASSERT_EQ(found.size(), cached.size());
    for (std::size_t k = 0; k < found.size(); ++k) {
      EXPECT_TRUE(at::allclose(found[k], cached[k], /*rtol=*/1e-2, /*atol=*/1e-5)) << i << ": " << k;
    }
  }
  EXPECT_FALSE(contains(fast.explain(), "eager")) << fast.explain();
}

TEST(GuardTest, AModelThatChangesBetweenCallsIsRecordedAgain) {
  const at::NoGradGuard no_grad;
  at::manual_seed(1);
  nn::Linear linear(4, 4);
  nn::Sequential model(linear, nn::Dropout(0.5));
  auto fast = script(model);
  const at::Tensor x = at::randn({2, 4});
  const auto expect_same = [&] {
    for (int i = 0; i < 4; ++i) {
      at::manual_seed(5);
      const at::Tensor expected = model->forward(x);
      at::manual_seed(5);
      EXPECT_TRUE(same_bits(fast(x), expected));
    }
  };
  expect_same();
  model->eval();
  expect_same();
  linear->weight.mul_(2);  // where it lies: the program sees it
  expect_same();
  linear->weight.set_data(at::randn({4, 4}));
  expect_same();
  linear->register_parameter("extra", at::ones({1}));
  expect_same();
  model->push_back(nn::Tanh());
  expect_same();
}

TEST(GuardTest, RandomScopesAreHeard) {
  const at::NoGradGuard no_grad;
  auto fast = script([](const at::Tensor& x) { return at::dropout(x, 0.5, true); });
  const at::Tensor x = at::ones({64});
  const auto fn = [](const at::Tensor& t) { return at::dropout(t, 0.5, true); };
  for (std::uint64_t step = 0; step < 6; ++step) {
    at::Tensor expected;
    {
      const core::RandomScope scope({.seed = 1, .step = step});
      expected = fn(x);
    }
    const core::RandomScope scope({.seed = 1, .step = step});
    EXPECT_TRUE(same_bits(fast(x), expected));
  }
  at::manual_seed(3);
  const at::Tensor expected = fn(x);
  at::manual_seed(3);
  EXPECT_TRUE(same_bits(fast(x), expected));
  EXPECT_TRUE(contains(fast.explain(), "program:")) << fast.explain();
}

TEST(GuardTest, ARandomScopeThatBeginsWithinStaysEager) {
  const at::NoGradGuard no_grad;
  std::uint64_t step = 0;
  const auto fn = [&step](const at::Tensor& t) {
    const core::RandomScope scope({.seed = 1, .step = step});
    return at::dropout(t, 0.5, true);
  };
  const at::Tensor x = at::ones({64});
  for (const bool is_within_another : {false, true}) {
    auto fast = script(fn);
    std::optional<core::RandomScope> outer;
    if (is_within_another) outer.emplace(core::RandomKey{.seed = 2});
    for (step = 0; step < 5; ++step) EXPECT_TRUE(same_bits(fast(x), fn(x)));
    EXPECT_TRUE(contains(fast.explain(), "draws in a core::RandomScope that begins within the function"))
        << fast.explain();
  }
  auto without = script([](const at::Tensor& t) {  // a scope that nobody draws from is none
    const core::RandomScope scope({.seed = 1});
    return t.relu();
  });
  for (int i = 0; i < 4; ++i) without(x);
  EXPECT_TRUE(contains(without.explain(), "program:")) << without.explain();
}

TEST(GuardTest, TooManyShapesRunEagerlyAndAreSaidOnce) {
  const at::NoGradGuard no_grad;
  int num_logged = 0;
  base::set_log_sink([&](base::LogLevel, std::string_view line) {
    num_logged += line.find("run eagerly") != std::string_view::npos ? 1 : 0;
  });
  auto fast = script([](const at::Tensor& x) { return x + 1; },
                     ScriptOptions().max_programs(2).min_operators(0).name("adds"));
  for (int i = 0; i < 12; ++i) EXPECT_EQ(fast(at::zeros({1 + i % 4})).sum().item<float>(), 1 + i % 4);
  base::set_log_sink(nullptr);
  EXPECT_EQ(num_logged, 1);
  EXPECT_TRUE(contains(fast.explain(), "there are too many programs")) << fast.explain();
}

// Prints how often the warning came for lambdas whose module is watched, and for two whose module is not.
void count_warnings_of_lambdas() {
  const at::NoGradGuard no_grad;
  int warnings = 0;
  base::set_log_level(base::LogLevel::kWarning);
  base::set_log_sink([&](base::LogLevel, std::string_view line) {
    warnings += line.find("uses parameters and watches no module") != std::string_view::npos ? 1 : 0;
  });
  nn::Sequential model(nn::Linear(4, 4), nn::Tanh(), nn::Linear(4, 4));
  const auto warnings_of = [&](const ScriptOptions& options) {
    const int before = warnings;
    auto fast = script([&](const at::Tensor& x) { return model->forward(x); }, options);
    for (int i = 0; i < 6; ++i) fast(at::full({2, 4}, i + 1.0));
    return contains(fast.explain(), "program: ") ? warnings - before : -1;
  };
  const int watched = warnings_of(ScriptOptions().min_operators(0).modules({model.ptr()}));
  const int unwatched = warnings_of(ScriptOptions().min_operators(0));
  const int again = warnings_of(ScriptOptions().min_operators(0));
  base::set_log_sink(nullptr);
  std::cerr << "watched " << watched << ", unwatched " << unwatched << ", again " << again << std::endl;
  std::_Exit(0);
}

// The warning comes once in a process, so it is counted in a process of its own.
TEST(GuardDeathTest, ALambdaThatWatchesNoModuleIsWarnedOfOnce) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(count_warnings_of_lambdas(), ::testing::ExitedWithCode(0), "watched 0, unwatched 1, again 0");
}

TEST(GuardTest, RejectsOptionsOutOfRange) {
  auto fast = script([](const at::Tensor& x) { return x + 1; }, ScriptOptions().max_programs(0));
  COHORT_EXPECT_THROW_WITH(fast(at::ones({1})), UsageError, "max_programs 0");
}

}  // namespace
}  // namespace cohort::script

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>

#include "cohort/autograd/recompute.h"
#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/core/random_scope.h"
#include "recompute_steps.h"
#include "tests/support/seeds.h"

// Random numbers of the second run.
namespace cohort {
namespace {

using autograd::recompute;
using test::expect_equal;
using test::input_of;

// A function that draws in three ways, and calls `between` in the middle of each run.
at::Tensor drawing(const at::Tensor& x, const std::function<void()>& between) {
  const at::Tensor h = at::dropout(x.sin(), 0.5, true);
  if (between != nullptr) between();
  const at::Tensor given = at::rand(x.sizes(), at::detail::getDefaultCPUGenerator());
  return at::dropout(h * x, 0.5, true) * given + at::randn_like(x) * x;
}

TEST(RecomputeTest, SecondRunsOnTwoThreadsAndDrawsBesideThemDoNotMeet) {
  using std::chrono::seconds;
  for (const bool in_scope : {false, true}) {
    at::manual_seed(5);
    std::optional<core::RandomScope> scope;
    if (in_scope) scope.emplace(core::RandomKey{.seed = 3});
    const at::Tensor x = input_of(), y = input_of();
    drawing(x, nullptr).sum().backward();
    drawing(y, nullptr).sum().backward();
    scope.reset();
    const at::Tensor beside = at::rand({3}), after = at::rand({3});

    at::manual_seed(5);
    if (in_scope) scope.emplace(core::RandomKey{.seed = 3});
    const at::Tensor a = input_of(), b = input_of();
    std::promise<void> is_within, may_continue;
    int runs = 0;
    const auto wait = [&] {
      if (++runs != 2) return;
      is_within.set_value();
      may_continue.get_future().wait_for(seconds(60));
    };
    const at::Tensor late = recompute([&](const at::Tensor& t) { return drawing(t, wait); }, a);
    const at::Tensor quick = recompute(
        [](const at::Tensor& t) {
          return recompute([](const at::Tensor& u) { return drawing(u, nullptr); }, t);
        },
        b);
    scope.reset();
    auto done = std::async(std::launch::async, [&] { late.sum().backward(); });
    ASSERT_EQ(is_within.get_future().wait_for(seconds(60)), std::future_status::ready);
    EXPECT_TRUE(at::equal(at::rand({3}), beside)) << in_scope;
    std::async(std::launch::async, [&] { quick.sum().backward(); }).get();
    may_continue.set_value();
    ASSERT_EQ(done.wait_for(seconds(60)), std::future_status::ready);
    done.get();
    EXPECT_EQ(runs, 2);
    EXPECT_TRUE(at::equal(a.grad(), x.grad())) << in_scope;
    EXPECT_TRUE(at::equal(b.grad(), y.grad())) << in_scope;
    EXPECT_TRUE(at::equal(at::rand({3}), after)) << in_scope;
  }
}

// What a function may do with the process's generator, apart from calling operators.
enum class Draw { kOperator, kSeed5, kSeed7, kOwnThread, kWithoutOperator, kNested };

// A function of `x` whose gradient depends on all numbers that it draws.
at::Tensor drawn(at::Tensor x, std::span<const Draw> draws, bool may_nest) {
  for (std::size_t i = 0; i < draws.size(); ++i) {
    at::Tensor noise;
    switch (draws[i]) {
      case Draw::kOperator:
        x = at::dropout(x, 0.5, true) + at::rand_like(x) * x;
        break;
      case Draw::kSeed5:
        at::manual_seed(5);
        break;
      case Draw::kSeed7:
        at::manual_seed(7);
        break;
      case Draw::kOwnThread:
        std::thread([&] { noise = at::rand({4, 6}); }).join();
        x = x * noise;
        break;
      case Draw::kWithoutOperator: {
        const at::Generator generator = at::detail::getDefaultCPUGenerator();
        x = x * static_cast<double>(at::check_generator<at::CPUGeneratorImpl>(generator)->random() % 100);
        break;
      }
      case Draw::kNested: {
        const std::vector<Draw> inner(draws.begin() + static_cast<std::ptrdiff_t>(i) + 1, draws.end());
        const auto fn = [inner](const at::Tensor& t) { return drawn(t, inner, true); };
        x = (may_nest ? recompute(fn, x) : fn(x)).sin();
        break;
      }
    }
  }
  return x;
}

// Value, gradient, and the generator's states before and after backward, which begins after `between`.
std::vector<at::Tensor> step_of(const std::vector<Draw>& draws, const std::vector<Draw>& between,
                                bool recomputes, bool in_scope) {
  const auto state = [] { return at::detail::getDefaultCPUGenerator().get_state(); };
  const auto fn = [&](const at::Tensor& t) { return drawn(t, draws, recomputes); };
  at::manual_seed(5);
  const at::Tensor x = input_of();
  std::optional<core::RandomScope> scope;
  if (in_scope) scope.emplace(core::RandomKey{.seed = 3});
  const at::Tensor value = recomputes ? recompute(fn, x) : fn(x);
  scope.reset();
  drawn(input_of(), between, false);
  const at::Tensor before = state();
  value.sum().backward();
  return {value.detach(), x.grad(), before, state()};
}

TEST(RecomputeTest, WhatSeedsOrDrawsFromTheGeneratorOfTheProcessDrawsTheSameTwice) {
  using enum Draw;
  // Within a scope what needs no operator is not the scope's; nor is it told apart in calls that nest.
  const std::vector<Draw> elsewhere{kOperator, kSeed5, kSeed7, kOwnThread, kWithoutOperator};
  const std::vector<std::vector<Draw>> kinds{
      {kOperator, kSeed5, kSeed7}, elsewhere, {kOperator, kOperator, kSeed5, kSeed7, kNested}};
  const auto some = [](std::mt19937& random, std::size_t most, const std::vector<Draw>& of) {
    std::vector<Draw> draws(random() % (most + 1));
    for (Draw& draw : draws) draw = of[random() % of.size()];
    return draws;
  };
  const auto seeds = test::Seeds::usual(300);
  for (unsigned program = seeds.first; program < seeds.end && !HasFailure(); ++program) {
    std::mt19937 random(program);
    const bool in_scope = program % 3 == 0;
    const std::vector<Draw> draws = some(random, 4, kinds[program % 3]);
    const std::vector<Draw> between = some(random, 2, elsewhere);
    std::string text;
    for (const auto* each : {&draws, &between}) {
      for (const Draw draw : *each) text += std::to_string(static_cast<int>(draw)) + " ";
      text += "| ";
    }
    SCOPED_TRACE(base::concat("program ", program, ": ", text, in_scope ? "in a scope" : ""));
    const auto plain = step_of(draws, between, false, in_scope);
    const auto recomputed = step_of(draws, between, true, in_scope);
    expect_equal(plain, recomputed);
    EXPECT_TRUE(at::equal(recomputed[2], recomputed[3])) << "backward leaves the generator as it finds it";
  }
}

TEST(RecomputeTest, RunsOnceMoreOnlyForWhatSeedsOrDrawsElsewhere) {
  const auto runs_of = [](const std::vector<Draw>& draws) {
    int runs = 0;
    at::manual_seed(3);
    const auto fn = [&](const at::Tensor& t) {
      ++runs;
      return drawn(t, draws, false) * 1;  // an input itself would need no second run
    };
    recompute(fn, input_of()).sum().backward();
    return runs;
  };
  EXPECT_EQ(runs_of({}), 2);
  EXPECT_EQ(runs_of({Draw::kOperator, Draw::kOperator}), 2);
  EXPECT_EQ(runs_of({Draw::kSeed7, Draw::kOperator}), 3);
  EXPECT_EQ(runs_of({Draw::kOwnThread}), 3);
}

// No second run can know how often this one drew.
TEST(RecomputeTest, ASecondRunThatDrawsOtherNumbersIsWarnedOf) {
  std::string lines;
  base::set_log_sink([&](base::LogLevel, std::string_view line) { lines += line; });
  int draws = 2;
  const auto fn = [&](const at::Tensor& t) {
    at::Tensor y = t;
    for (int i = 0; i < draws; ++i) y = at::dropout(y, 0.5, true);
    return y;
  };
  const at::Tensor value = recompute(fn, input_of());
  const at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
  draws = 1;
  value.sum().backward();
  base::set_log_sink({});
  EXPECT_NE(lines.find("fn drew other random numbers when it ran again in backward"), std::string::npos);
  EXPECT_TRUE(at::equal(state, at::detail::getDefaultCPUGenerator().get_state()));
}

// As docs/guide/core.md says. A change that makes one of these repeat its numbers changes that page.
TEST(RecomputeTest, GeneratorsOfItsOwnAndThreadsWithinAScopeDrawOn) {
  const auto repeats = [](const std::function<at::Tensor()>& draw) {
    const at::Tensor x = at::ones({4, 6}).requires_grad_();
    const at::Tensor value = recompute([&](const at::Tensor& t) { return t * draw(); }, x);
    value.sum().backward();
    return at::equal(value.detach(), x.grad());
  };
  const auto own = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto on_thread = [] {
    at::Tensor noise;
    std::thread([&] { noise = at::rand({4, 6}); }).join();
    return noise;
  };
  EXPECT_FALSE(repeats([&] { return at::rand({4, 6}, own); }));
  EXPECT_TRUE(repeats(on_thread));
  const core::RandomScope scope(core::RandomKey{.seed = 3});
  EXPECT_FALSE(repeats(on_thread));
  EXPECT_TRUE(repeats([] { return at::rand({4, 6}); }));
}

TEST(RecomputeTest, DrawsTheNumbersOfTheFirstRun) {
  torch::nn::Sequential net(torch::nn::Linear(6, 16), torch::nn::Dropout(0.5), torch::nn::Linear(16, 6));
  const auto step = [&](bool recomputes, bool backward_in_scope) {
    at::Tensor x = at::ones({4, 6}).requires_grad_();
    net->zero_grad();
    at::Tensor y, after;
    std::optional<core::RandomScope> scope(std::in_place, core::RandomKey{.seed = 11});
    y = recomputes ? autograd::recompute(net, x) : net->forward(x);
    after = at::rand({3});
    if (!backward_in_scope) scope.reset();
    y.sum().backward();
    if (backward_in_scope) after = at::cat({after, at::rand({3})});
    return std::vector<at::Tensor>{y.detach(), x.grad(), net->parameters().front().grad().clone(), after};
  };
  for (const bool in_scope : {false, true}) {
    const auto plain = step(false, in_scope), recomputed = step(true, in_scope);
    for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], recomputed[i])) << i;
  }
}

TEST(RecomputeTest, OfAnOutsideRunWithinAScopeDrawsFromTheGlobalGenerator) {
  const at::Tensor x = at::ones({50}).requires_grad_();
  const at::Tensor y = autograd::recompute([](const at::Tensor& t) { return at::dropout(t, 0.5, true); }, x);
  const core::RandomScope scope(core::RandomKey{.seed = 11});
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.detach()));
}

}  // namespace
}  // namespace cohort

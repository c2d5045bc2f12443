#include "cohort/core/recompute.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <future>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>

#include "cohort/core/error.h"
#include "cohort/core/live_bytes.h"
#include "cohort/core/log.h"
#include "cohort/core/random_scope.h"
#include "tests/support/seeds.h"
#include "tests/support/throws.h"

namespace cohort {
namespace {

namespace nn = torch::nn;
using core::checkpoint;
using core::CheckpointOptions;

nn::Sequential make_part(double dropout = 0.3) {
  return nn::Sequential(nn::Linear(6, 16), nn::Tanh(), nn::Dropout(dropout), nn::Linear(16, 6), nn::ReLU());
}

at::Tensor input_of(bool requires_grad = true) {
  return at::arange(24, at::kFloat).view({4, 6}).sin().requires_grad_(requires_grad);
}

std::vector<at::Tensor> gradients_of(nn::Sequential net) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : net->parameters()) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  net->zero_grad();
  return gradients;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    if (!a[i].defined()) continue;
    EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  }
}

// The value, the gradients of `x` and `net`, and the next random number, of one step with `forward`.
template <typename Forward>
std::vector<at::Tensor> step(nn::Sequential& net, at::Tensor x, const Forward& forward) {
  at::manual_seed(5);
  const at::Tensor value = forward(x);
  value.square().sum().backward();
  std::vector<at::Tensor> all = gradients_of(net);
  all.push_back(value.detach());
  all.push_back(x.grad());
  all.push_back(at::rand({3}));
  return all;
}

TEST(CheckpointTest, ValuesGradientsAndRandomNumbersAreTheBitsOfThePlainCall) {
  nn::Sequential net = make_part();
  const auto plain = step(net, input_of(), [&](const at::Tensor& x) { return net->forward(x); });
  expect_equal(plain, step(net, input_of(), [&](const at::Tensor& x) { return checkpoint(net, x); }));
  expect_equal(plain, step(net, input_of(), [&](const at::Tensor& x) {
                 return checkpoint([&](const at::Tensor& t) { return net->forward(t); }, x);
               }));
  // One part after the other, each with its own second run, between layers that have none.
  const auto chained = [&](auto&& part) {
    return [&](const at::Tensor& x) { return part(part(x * 2).tanh()) * 3; };
  };
  const auto plain_chain =
      step(net, input_of(), chained([&](const at::Tensor& x) { return net->forward(x); }));
  expect_equal(plain_chain,
               step(net, input_of(), chained([&](const at::Tensor& x) { return checkpoint(net, x); })));
}

TEST(CheckpointTest, OtherRandomNumbersInTheSecondRunWhereThatIsAskedFor) {
  nn::Sequential net = make_part();
  const auto plain = step(net, input_of(), [&](const at::Tensor& x) { return net->forward(x); });
  const auto other = step(net, input_of(), [&](const at::Tensor& x) {
    return checkpoint(CheckpointOptions{.preserve_rng_state = false}, net, x);
  });
  EXPECT_TRUE(at::equal(plain[4], other[4]));   // the value, of the first run
  EXPECT_FALSE(at::equal(plain[2], other[2]));  // a gradient behind the dropout of the second
}

// A function that draws in three ways, and calls `between` in the middle of each run.
at::Tensor drawing(const at::Tensor& x, const std::function<void()>& between) {
  const at::Tensor h = at::dropout(x.sin(), 0.5, true);
  if (between != nullptr) between();
  const at::Tensor given = at::rand(x.sizes(), at::detail::getDefaultCPUGenerator());
  return at::dropout(h * x, 0.5, true) * given + at::randn_like(x) * x;
}

TEST(CheckpointTest, SecondRunsOnTwoThreadsAndDrawsBesideThemDoNotMeet) {
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
    std::promise<void> is_within, may_go_on;
    int runs = 0;
    const auto wait = [&] {
      if (++runs != 2) return;
      is_within.set_value();
      may_go_on.get_future().wait_for(seconds(60));
    };
    const at::Tensor late = checkpoint([&](const at::Tensor& t) { return drawing(t, wait); }, a);
    const at::Tensor quick = checkpoint(
        [](const at::Tensor& t) {
          return checkpoint([](const at::Tensor& u) { return drawing(u, nullptr); }, t);
        },
        b);
    scope.reset();
    auto done = std::async(std::launch::async, [&] { late.sum().backward(); });
    ASSERT_EQ(is_within.get_future().wait_for(seconds(60)), std::future_status::ready);
    EXPECT_TRUE(at::equal(at::rand({3}), beside)) << in_scope;
    std::async(std::launch::async, [&] { quick.sum().backward(); }).get();
    may_go_on.set_value();
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
        x = (may_nest ? checkpoint(fn, x) : fn(x)).sin();
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
  const at::Tensor value = recomputes ? checkpoint(fn, x) : fn(x);
  scope.reset();
  drawn(input_of(), between, false);
  const at::Tensor before = state();
  value.sum().backward();
  return {value.detach(), x.grad(), before, state()};
}

TEST(CheckpointTest, WhatSeedsOrDrawsFromTheGeneratorOfTheProcessDrawsTheSameTwice) {
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
    SCOPED_TRACE(core::concat("program ", program, ": ", text, in_scope ? "in a scope" : ""));
    const auto plain = step_of(draws, between, false, in_scope);
    const auto recomputed = step_of(draws, between, true, in_scope);
    expect_equal(plain, recomputed);
    EXPECT_TRUE(at::equal(recomputed[2], recomputed[3])) << "backward leaves the generator as it finds it";
  }
}

TEST(CheckpointTest, RunsOnceMoreOnlyForWhatSeedsOrDrawsElsewhere) {
  const auto runs_of = [](const std::vector<Draw>& draws) {
    int runs = 0;
    at::manual_seed(3);
    const auto fn = [&](const at::Tensor& t) {
      ++runs;
      return drawn(t, draws, false);
    };
    checkpoint(fn, input_of()).sum().backward();
    return runs;
  };
  EXPECT_EQ(runs_of({}), 2);
  EXPECT_EQ(runs_of({Draw::kOperator, Draw::kOperator}), 2);
  EXPECT_EQ(runs_of({Draw::kSeed7, Draw::kOperator}), 3);
  EXPECT_EQ(runs_of({Draw::kOwnThread}), 3);
}

// No second run can know how often this one drew.
TEST(CheckpointTest, ASecondRunThatDrawsOtherNumbersIsWarnedOf) {
  std::string lines;
  core::set_log_sink([&](core::LogLevel, std::string_view line) { lines += line; });
  int draws = 2;
  const auto fn = [&](const at::Tensor& t) {
    at::Tensor y = t;
    for (int i = 0; i < draws; ++i) y = at::dropout(y, 0.5, true);
    return y;
  };
  const at::Tensor value = checkpoint(fn, input_of());
  const at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
  draws = 1;
  value.sum().backward();
  core::set_log_sink({});
  EXPECT_NE(lines.find("fn drew other random numbers when it ran again in backward"), std::string::npos);
  EXPECT_TRUE(at::equal(state, at::detail::getDefaultCPUGenerator().get_state()));
}

// As docs/core.md says. A change that makes one of these repeat its numbers changes that page.
TEST(CheckpointTest, GeneratorsOfItsOwnAndThreadsWithinAScopeDrawOn) {
  const auto repeats = [](const std::function<at::Tensor()>& draw) {
    const at::Tensor x = at::ones({4, 6}).requires_grad_();
    const at::Tensor value = checkpoint([&](const at::Tensor& t) { return t * draw(); }, x);
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

TEST(CheckpointTest, CallsNest) {
  nn::Sequential net = make_part();
  const auto whole = [&](auto&& inner) {
    return [&](const at::Tensor& x) { return inner(inner(x).sin() + inner(x * 2)); };
  };
  const auto plain = step(net, input_of(), whole([&](const at::Tensor& x) { return net->forward(x); }));
  const auto inner = [&](const at::Tensor& x) { return checkpoint(net, x); };
  const auto middle = [&](const at::Tensor& x) { return checkpoint(whole(inner), x); };
  const auto nested = step(net, input_of(), middle);
  ASSERT_EQ(nested.size(), plain.size());
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::allclose(plain[i], nested[i], 1e-5, 1e-6));
  // What is not summed in another order has the same bits: the value, the input's gradient, the generator.
  for (std::size_t i = 4; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], nested[i])) << i;
}

struct Pair {
  at::Tensor sum;
  std::vector<at::Tensor> parts;
  std::string name;
};
COHORT_NESTED(Pair, sum, parts, name)

TEST(CheckpointTest, TakesAndReturnsWhateverHoldsTensors) {
  nn::Linear layer(6, 6);
  const auto fn = [&](const Pair& pair, std::int64_t power, const std::unique_ptr<at::Tensor>& scale,
                      const std::optional<at::Tensor>& none) {
    EXPECT_FALSE(none.has_value());
    const at::Tensor y = layer(pair.sum) * *scale;
    return std::make_tuple(
        Pair{y, {y.argmax(1), y.pow(static_cast<double>(power)), at::Tensor()}, pair.name + "!"}, 7,
        pair.parts[0] + y);
  };
  const auto run = [&](const auto& call) {
    const at::Tensor x = input_of(), scale = at::full({}, 2.0F).requires_grad_();
    auto [pair, seven, sum] = call(Pair{x, {at::ones({4, 6})}, "name"}, std::make_unique<at::Tensor>(scale));
    EXPECT_EQ(pair.name, "name!");
    EXPECT_EQ(seven, 7);
    EXPECT_FALSE(pair.parts[0].requires_grad());
    EXPECT_FALSE(pair.parts[2].defined());
    (pair.sum.sum() + pair.parts[1].square().sum()).backward();  // `sum` has no part in it
    std::vector<at::Tensor> all{pair.sum, pair.parts[0], pair.parts[1], sum, x.grad(), scale.grad()};
    all.push_back(layer->weight.grad().clone());
    layer->zero_grad();
    return all;
  };
  const auto plain =
      run([&](Pair pair, std::unique_ptr<at::Tensor> scale) { return fn(pair, 2, scale, std::nullopt); });
  expect_equal(plain, run([&](Pair pair, std::unique_ptr<at::Tensor> scale) {
                 return checkpoint(fn, std::move(pair), std::int64_t{2}, std::move(scale),
                                   std::optional<at::Tensor>());
               }));
}

TEST(CheckpointTest, ParametersGetGradientsWhereNoInputNeedsOne) {
  nn::Sequential net = make_part();
  const auto run = [&](const auto& call) {
    at::manual_seed(1);
    const at::Tensor value = call(input_of(false));
    EXPECT_TRUE(value.requires_grad());
    value.sum().backward();
    return gradients_of(net);
  };
  const auto plain = run([&](const at::Tensor& x) { return net->forward(x); });
  expect_equal(plain, run([&](const at::Tensor& x) { return checkpoint(net, x); }));
  expect_equal(plain,
               run([&](const at::Tensor& x) { return checkpoint([&net, x] { return net->forward(x); }); }));
  // A part that is frozen needs none, and its results say so.
  for (at::Tensor& parameter : net->parameters()) parameter.requires_grad_(false);
  EXPECT_FALSE(checkpoint(net, input_of(false)).requires_grad());
  EXPECT_TRUE(checkpoint(net, input_of(true)).requires_grad());
}

TEST(CheckpointTest, InputsMayBeResultsAndTheSameTensorTwice) {
  const at::Tensor x = input_of();
  const auto swap = [](const at::Tensor& a, const at::Tensor& b) { return std::make_pair(b, a * 2); };
  auto [same, twice] = checkpoint(swap, x, x);
  (same.sum() + twice.sum() * 10).backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({4, 6}, 21.0F)));
  EXPECT_TRUE(at::equal(same, x));
}

TEST(CheckpointTest, HooksOfParametersFireOnceEach) {
  nn::Linear layer(6, 6);
  int hooks = 0;
  layer->weight.register_hook([&](const at::Tensor& gradient) {
    ++hooks;
    return gradient * 2;
  });
  layer(input_of()).sum().backward();
  const at::Tensor plain = layer->weight.grad().clone();
  layer->zero_grad();
  checkpoint(layer, input_of()).sum().backward();
  EXPECT_EQ(hooks, 2);
  EXPECT_TRUE(at::equal(layer->weight.grad(), plain));
}

TEST(CheckpointTest, TheSecondRunHasTheFirstOnesAutocast) {
  nn::Sequential net = make_part();
  std::vector<at::ScalarType> types;
  const auto fn = [&](const at::Tensor& x) {
    at::Tensor y = net->forward(x);
    types.push_back(y.scalar_type());
    return y;
  };
  const auto run = [&](const auto& call, bool backward_within) {
    at::manual_seed(3);
    const at::Tensor x = input_of();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
    const at::Tensor before = net->forward(x);  // autocast keeps its casts of the parameters
    const at::Tensor value = call(before.to(at::kFloat)).sum();
    if (backward_within) value.backward();
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    if (!backward_within) value.backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    auto all = gradients_of(net);
    all.push_back(x.grad());
    return all;
  };
  const auto again = [&](const at::Tensor& x) { return checkpoint(fn, x); };
  for (const bool within : {false, true}) {
    types.clear();
    const auto plain = run(fn, within), recomputed = run(again, within);
    EXPECT_EQ(types, std::vector<at::ScalarType>(3, at::kBFloat16));
    EXPECT_TRUE(at::equal(plain.back(), recomputed.back()));
    // The parameters are used within and before: what plain autocast adds up in bfloat16 is added up in
    // float.
    for (std::size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::allclose(plain[i], recomputed[i], 2e-2, 1e-2)) << i;
    }
  }
}

TEST(CheckpointTest, RunningStatisticsMoveOnce) {
  const auto make = [] {
    at::manual_seed(2);
    return nn::Sequential(nn::Linear(6, 6), nn::BatchNorm1d(6), nn::ReLU());
  };
  nn::Sequential plain = make(), module = make(), named = make();
  plain->forward(input_of()).sum().backward();
  checkpoint(module, input_of()).sum().backward();
  checkpoint(
      CheckpointOptions{.buffers = named->buffers()}, [&](const at::Tensor& x) { return named->forward(x); },
      input_of())
      .sum()
      .backward();
  expect_equal(plain->buffers(), module->buffers());
  expect_equal(plain->buffers(), named->buffers());
  expect_equal(gradients_of(plain), gradients_of(module));
}

// Second runs of one module on several threads, which begin and end in every order that there is.
TEST(CheckpointTest, SecondRunsOnSeveralThreadsLeaveTheBuffers) {
  using std::chrono::seconds;
  constexpr int kThreads = 3;
  at::manual_seed(2);
  nn::BatchNorm1d norm(6);
  const at::Tensor tracked = norm->num_batches_tracked;
  std::vector<int> ends{0, 1, 2};
  do {
    std::vector<at::Tensor> values;
    std::vector<std::promise<void>> is_within(kThreads), may_end(kThreads);
    for (int i = 0; i < kThreads; ++i) {
      const auto runs = std::make_shared<int>(0);
      const auto fn = [&, i, runs](const at::Tensor& x) {
        const at::Tensor y = norm->forward(x * (i + 1));
        if (++*runs == 1) return y;
        is_within[static_cast<std::size_t>(i)].set_value();
        may_end[static_cast<std::size_t>(i)].get_future().wait_for(seconds(60));
        return norm->forward(y) * 0 + y;
      };
      values.push_back(checkpoint(CheckpointOptions{.buffers = norm->buffers()}, fn, input_of()));
    }
    std::vector<at::Tensor> before;
    for (const at::Tensor& buffer : norm->buffers()) before.push_back(buffer.clone());
    std::vector<std::future<void>> threads;
    for (std::size_t i = 0; i < values.size(); ++i) {  // each begins on what those before it have written
      threads.push_back(std::async(std::launch::async, [&, i] { values[i].sum().backward(); }));
      ASSERT_EQ(is_within[i].get_future().wait_for(seconds(60)), std::future_status::ready);
    }
    EXPECT_FALSE(at::equal(norm->running_mean, before[0]));
    for (const int i : ends) {
      may_end[static_cast<std::size_t>(i)].set_value();
      threads[static_cast<std::size_t>(i)].get();
    }
    expect_equal(norm->buffers(), before);
  } while (std::next_permutation(ends.begin(), ends.end()));
  EXPECT_EQ(tracked.item<std::int64_t>(), 6 * kThreads) << "once for each call";
}

// The last buffer's value cannot be kept: it has too many elements for any memory.
TEST(CheckpointTest, ASecondRunThatCannotKeepABufferLeavesTheOthersToLaterRuns) {
  nn::BatchNorm1d norm(6);
  const auto fn = [&](const at::Tensor& x) { return norm->forward(x); };
  std::vector<at::Tensor> buffers = norm->buffers();
  const at::Tensor sound = checkpoint(CheckpointOptions{.buffers = buffers}, fn, input_of());
  buffers.push_back(at::zeros({1}).expand({std::int64_t{1} << 50}));
  const at::Tensor failing = checkpoint(CheckpointOptions{.buffers = buffers}, fn, input_of());
  EXPECT_THROW(failing.sum().backward(), c10::Error);
  fn(input_of());
  buffers.pop_back();
  std::vector<at::Tensor> before;
  for (const at::Tensor& buffer : buffers) before.push_back(buffer.clone());
  sound.sum().backward();
  expect_equal(buffers, before);
}

TEST(CheckpointTest, GradientsOffIsAPlainCall) {
  nn::Sequential net = make_part();
  const at::NoGradGuard no_grad;
  int calls = 0;
  const at::Tensor value = checkpoint(
      [&](const at::Tensor& x) {
        ++calls;
        return net->forward(x);
      },
      input_of());
  EXPECT_FALSE(value.requires_grad());
  EXPECT_EQ(calls, 1);
}

TEST(CheckpointTest, WhatIsSavedWithinItDoesNotOutliveTheCall) {
  nn::Sequential net = make_part(0);
  c10::weak_intrusive_ptr<at::TensorImpl> inside(c10::intrusive_ptr<at::TensorImpl>{});
  const at::Tensor x = input_of();
  const auto fn = [&](const at::Tensor& t) {
    const at::Tensor y = t.exp();  // saved by exp and by the layers behind it
    inside = c10::weak_intrusive_ptr<at::TensorImpl>(y.getIntrusivePtr());
    return net->forward(y);
  };
  const at::Tensor plain = fn(x);
  EXPECT_FALSE(inside.expired());
  const at::Tensor value = checkpoint(fn, x);
  EXPECT_TRUE(inside.expired());
  value.sum().backward();
  EXPECT_TRUE(inside.expired());
}

TEST(CheckpointTest, ADeepNetworkNeedsLessMemory) {
  const std::int64_t width = 256, depth = 36;
  nn::Sequential net;
  std::vector<nn::Sequential> parts;
  for (std::int64_t i = 0; i < depth; ++i) {
    if (i % 6 == 0) parts.emplace_back(nn::Sequential());
    parts.back()->push_back(nn::Linear(width, width));
    parts.back()->push_back(nn::Tanh());
  }
  const auto peak_of = [&](const auto& call) {
    for (auto& part : parts) {
      for (at::Tensor& parameter : part->parameters()) parameter.mutable_grad() = at::zeros_like(parameter);
    }
    const core::LiveBytes bytes;
    at::Tensor x = at::ones({256, width}).requires_grad_();
    for (auto& part : parts) x = call(part, x);
    x.sum().backward();
    return bytes.peak();
  };
  const std::int64_t activation = 256 * width * 4;
  const std::int64_t plain =
      peak_of([](nn::Sequential& part, const at::Tensor& x) { return part->forward(x); });
  const std::int64_t less =
      peak_of([](nn::Sequential& part, const at::Tensor& x) { return checkpoint(part, x); });
  EXPECT_GE(plain, depth * activation);       // one for each layer
  EXPECT_LE(less, (6 + 6 + 8) * activation);  // one for each part, and one part's layers
}

TEST(CheckpointTest, GoesBackTwiceWhereTheGraphIsRetained) {
  nn::Sequential net = make_part();
  const at::Tensor x = input_of();
  const at::Tensor value = checkpoint(net, x).sum();
  value.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  value.backward();
  EXPECT_TRUE(at::equal(x.grad(), once + once));
  COHORT_EXPECT_THROW_WITH(value.backward(), c10::Error, "backward through the graph a second time");
}

TEST(CheckpointTest, AutogradGradAndBackwardWithInputsAskForSomeGradients) {
  nn::Sequential net = make_part(0);
  at::Tensor x = input_of();
  const std::vector<at::Tensor> wanted{x, net->parameters()[1]};
  const auto plain = torch::autograd::grad({net->forward(x).square().sum()}, wanted);
  expect_equal(torch::autograd::grad({checkpoint(net, x).square().sum()}, wanted), plain);
  const at::Tensor loss = checkpoint(net, x).square().sum();
  loss.backward({}, true, false, {{x}});
  EXPECT_TRUE(at::equal(x.grad(), plain[0]));
  for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(CheckpointTest, WhatItCannotDoIsRefused) {
  nn::Sequential net = make_part();
  const at::Tensor x = input_of();
  const at::Tensor loss = checkpoint(net, x).sum();
  COHORT_EXPECT_THROW_WITH(loss.backward({}, true, /*create_graph=*/true), UsageError,
                           "backward with create_graph goes through a recomputed part");
  const at::Tensor outside = x.exp();
  COHORT_EXPECT_THROW_WITH(checkpoint([&](const at::Tensor& t) { return t * outside; }, x), UsageError,
                           "fn uses a tensor with a graph of its own (ExpBackward0) that is not an input");
  for (const at::Tensor& input : {input_of(false), input_of() * 1}) {
    COHORT_EXPECT_THROW_WITH(checkpoint([](const at::Tensor& t) { return t.mul_(2); }, input), UsageError,
                             "fn changed its input 0 Float[4, 6] in place");
  }
}

TEST(CheckpointTest, ASecondRunThatDiffersIsRefused) {
  nn::Linear layer(6, 6);
  at::Tensor x = input_of();
  {
    const at::Tensor value = checkpoint(layer, x);
    const at::NoGradGuard no_grad;
    layer->weight.add_(1);
    const at::AutoGradMode on(true);
    COHORT_EXPECT_THROW_WITH(value.sum().backward(), UsageError,
                             "a parameter Float[6, 6] that fn uses was changed between its two runs");
  }
  std::int64_t rows = 4;
  const auto narrow = [&](const at::Tensor& t) { return layer(t.narrow(0, 0, rows--)); };
  COHORT_EXPECT_THROW_WITH(checkpoint(narrow, x).sum().backward(), UsageError,
                           "result 0 of fn was Float[4, 6], and when it ran again in backward Float[3, 6]");
  const auto more = [&](const at::Tensor& t) {
    return std::vector<at::Tensor>(static_cast<std::size_t>(rows++), layer(t));
  };
  COHORT_EXPECT_THROW_WITH(checkpoint(more, x)[0].sum().backward(), UsageError,
                           "fn returned 2 tensors, and 3 when it ran again in backward");
  {
    const at::Tensor value = checkpoint(layer, x.detach().requires_grad_());
    at::Tensor changed = input_of(false);
    const at::Tensor other = checkpoint(layer, changed);
    changed.add_(1);
    COHORT_EXPECT_THROW_WITH(other.sum().backward(), c10::Error, "modified by an inplace operation");
    value.sum().backward();
  }
}

TEST(CheckpointTest, AnErrorOfTheSecondRunLeavesTheGeneratorAlone) {
  const at::Tensor x = input_of();
  bool fails = false;
  const at::Tensor value = checkpoint(
      [&](const at::Tensor& t) {
        const at::Tensor noise = at::rand_like(t);
        if (fails) throw DataError("test", "the second run fails");
        return t * noise;
      },
      x);
  fails = true;
  const at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
  COHORT_EXPECT_THROW_WITH(value.sum().backward(), DataError, "the second run fails");
  EXPECT_TRUE(at::equal(state, at::detail::getDefaultCPUGenerator().get_state()));
}

}  // namespace
}  // namespace cohort

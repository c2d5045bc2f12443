#include "cohort/autograd/recompute.h"

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
#include <string>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/core/random_scope.h"
#include "cohort/memory/internal/live_bytes.h"
#include "recompute_steps.h"
#include "tests/support/throws.h"

namespace cohort {
namespace {

namespace nn = torch::nn;
using autograd::recompute;
using autograd::RecomputeOptions;
using test::expect_equal;
using test::gradients_of;
using test::input_of;
using test::make_part;
using test::step;

TEST(RecomputeTest, ValuesGradientsAndRandomNumbersAreTheBitsOfThePlainCall) {
  nn::Sequential net = make_part();
  const auto plain = step(net, input_of(), [&](const at::Tensor& x) { return net->forward(x); });
  expect_equal(plain, step(net, input_of(), [&](const at::Tensor& x) { return recompute(net, x); }));
  expect_equal(plain, step(net, input_of(), [&](const at::Tensor& x) {
                 return recompute([&](const at::Tensor& t) { return net->forward(t); }, x);
               }));
  // One part after the other, each with its own second run, between layers that have none.
  const auto chained = [&](auto&& part) {
    return [&](const at::Tensor& x) { return part(part(x * 2).tanh()) * 3; };
  };
  const auto plain_chain =
      step(net, input_of(), chained([&](const at::Tensor& x) { return net->forward(x); }));
  expect_equal(plain_chain,
               step(net, input_of(), chained([&](const at::Tensor& x) { return recompute(net, x); })));
}

TEST(RecomputeTest, OtherRandomNumbersInTheSecondRunWhereThatIsAskedFor) {
  nn::Sequential net = make_part();
  const auto plain = step(net, input_of(), [&](const at::Tensor& x) { return net->forward(x); });
  const auto other = step(net, input_of(), [&](const at::Tensor& x) {
    return recompute(RecomputeOptions{.preserve_rng_state = false}, net, x);
  });
  EXPECT_TRUE(at::equal(plain[4], other[4]));   // the value, of the first run
  EXPECT_FALSE(at::equal(plain[2], other[2]));  // a gradient after the dropout of the second
}

TEST(RecomputeTest, CallsNest) {
  nn::Sequential net = make_part();
  const auto whole = [&](auto&& inner) {
    return [&](const at::Tensor& x) { return inner(inner(x).sin() + inner(x * 2)); };
  };
  const auto plain = step(net, input_of(), whole([&](const at::Tensor& x) { return net->forward(x); }));
  const auto inner = [&](const at::Tensor& x) { return recompute(net, x); };
  const auto middle = [&](const at::Tensor& x) { return recompute(whole(inner), x); };
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

TEST(RecomputeTest, TakesAndReturnsWhateverHoldsTensors) {
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
                 return recompute(fn, std::move(pair), std::int64_t{2}, std::move(scale),
                                  std::optional<at::Tensor>());
               }));
}

TEST(RecomputeTest, ParametersGetGradientsWhereNoInputNeedsOne) {
  nn::Sequential net = make_part();
  const auto run = [&](const auto& call) {
    at::manual_seed(1);
    const at::Tensor value = call(input_of(false));
    EXPECT_TRUE(value.requires_grad());
    value.sum().backward();
    return gradients_of(net);
  };
  const auto plain = run([&](const at::Tensor& x) { return net->forward(x); });
  expect_equal(plain, run([&](const at::Tensor& x) { return recompute(net, x); }));
  expect_equal(plain,
               run([&](const at::Tensor& x) { return recompute([&net, x] { return net->forward(x); }); }));
  // A part that is frozen needs none, and its results say so.
  for (at::Tensor& parameter : net->parameters()) parameter.requires_grad_(false);
  EXPECT_FALSE(recompute(net, input_of(false)).requires_grad());
  EXPECT_TRUE(recompute(net, input_of(true)).requires_grad());
}

TEST(RecomputeTest, InputsMayBeResultsAndTheSameTensorTwice) {
  const at::Tensor x = input_of();
  const auto swap = [](const at::Tensor& a, const at::Tensor& b) { return std::make_pair(b, a * 2); };
  auto [same, twice] = recompute(swap, x, x);
  (same.sum() + twice.sum() * 10).backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({4, 6}, 21.0F)));
  EXPECT_TRUE(at::equal(same, x));
}

TEST(RecomputeTest, HooksOfParametersFireOnceEach) {
  nn::Linear layer(6, 6);
  int hooks = 0;
  layer->weight.register_hook([&](const at::Tensor& gradient) {
    ++hooks;
    return gradient * 2;
  });
  layer(input_of()).sum().backward();
  const at::Tensor plain = layer->weight.grad().clone();
  layer->zero_grad();
  recompute(layer, input_of()).sum().backward();
  EXPECT_EQ(hooks, 2);
  EXPECT_TRUE(at::equal(layer->weight.grad(), plain));
}

TEST(RecomputeTest, TheSecondRunHasTheFirstOnesAutocast) {
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
  const auto again = [&](const at::Tensor& x) { return recompute(fn, x); };
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

TEST(RecomputeTest, ARunWithoutAutocastsCacheLeavesTheCastsInIt) {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_(), own = at::ones({2, 2}).requires_grad_();
  const at::Tensor input = at::ones({2, 2});
  const auto cast_of = [](const at::Tensor& product) {
    return product.grad_fn()->next_edge(1).function.get();
  };
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor first = at::mm(input, weight);
  at::autocast::set_autocast_cache_enabled(false);  // as on a thread that does not have the cache
  const auto fn = [&](const at::Tensor& x) { return at::mm(x, own); };
  recompute(fn, at::ones({2, 2}).requires_grad_()).sum().backward();
  at::autocast::set_autocast_cache_enabled(true);
  const at::Tensor second = at::mm(input, weight);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(cast_of(first), cast_of(second));
  at::autocast::clear_cache();
  EXPECT_TRUE(own.grad().defined());
}

TEST(RecomputeTest, RunningStatisticsMoveOnce) {
  const auto make = [] {
    at::manual_seed(2);
    return nn::Sequential(nn::Linear(6, 6), nn::BatchNorm1d(6), nn::ReLU());
  };
  nn::Sequential plain = make(), module = make(), named = make();
  plain->forward(input_of()).sum().backward();
  recompute(module, input_of()).sum().backward();
  recompute(
      RecomputeOptions{.buffers = named->buffers()}, [&](const at::Tensor& x) { return named->forward(x); },
      input_of())
      .sum()
      .backward();
  expect_equal(plain->buffers(), module->buffers());
  expect_equal(plain->buffers(), named->buffers());
  expect_equal(gradients_of(plain), gradients_of(module));
}

// Second runs of one module on several threads, which begin and end in every order that there is.
TEST(RecomputeTest, SecondRunsOnSeveralThreadsLeaveTheBuffers) {
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
      values.push_back(recompute(RecomputeOptions{.buffers = norm->buffers()}, fn, input_of()));
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
TEST(RecomputeTest, ASecondRunThatCannotKeepABufferLeavesTheOthersToLaterRuns) {
  nn::BatchNorm1d norm(6);
  const auto fn = [&](const at::Tensor& x) { return norm->forward(x); };
  std::vector<at::Tensor> buffers = norm->buffers();
  const at::Tensor sound = recompute(RecomputeOptions{.buffers = buffers}, fn, input_of());
  buffers.push_back(at::zeros({1}).expand({std::int64_t{1} << 50}));
  const at::Tensor failing = recompute(RecomputeOptions{.buffers = buffers}, fn, input_of());
  EXPECT_THROW(failing.sum().backward(), c10::Error);
  fn(input_of());
  buffers.pop_back();
  std::vector<at::Tensor> before;
  for (const at::Tensor& buffer : buffers) before.push_back(buffer.clone());
  sound.sum().backward();
  expect_equal(buffers, before);
}

TEST(RecomputeTest, GradientsOffIsAPlainCall) {
  nn::Sequential net = make_part();
  const at::NoGradGuard no_grad;
  int calls = 0;
  const at::Tensor value = recompute(
      [&](const at::Tensor& x) {
        ++calls;
        return net->forward(x);
      },
      input_of());
  EXPECT_FALSE(value.requires_grad());
  EXPECT_EQ(calls, 1);
}

TEST(RecomputeTest, WhatIsSavedWithinItDoesNotOutliveTheCall) {
  nn::Sequential net = make_part(0);
  c10::weak_intrusive_ptr<at::TensorImpl> inside(c10::intrusive_ptr<at::TensorImpl>{});
  const at::Tensor x = input_of();
  const auto fn = [&](const at::Tensor& t) {
    const at::Tensor y = t.exp();  // saved by exp and by the layers after it
    inside = c10::weak_intrusive_ptr<at::TensorImpl>(y.getIntrusivePtr());
    return net->forward(y);
  };
  const at::Tensor plain = fn(x);
  EXPECT_FALSE(inside.expired());
  const at::Tensor value = recompute(fn, x);
  EXPECT_TRUE(inside.expired());
  value.sum().backward();
  EXPECT_TRUE(inside.expired());
}

TEST(RecomputeTest, ADeepNetworkNeedsLessMemory) {
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
    const memory::LiveBytes bytes;
    at::Tensor x = at::ones({256, width}).requires_grad_();
    for (auto& part : parts) x = call(part, x);
    x.sum().backward();
    return bytes.peak();
  };
  const std::int64_t activation = 256 * width * 4;
  const std::int64_t plain =
      peak_of([](nn::Sequential& part, const at::Tensor& x) { return part->forward(x); });
  const std::int64_t less =
      peak_of([](nn::Sequential& part, const at::Tensor& x) { return recompute(part, x); });
  EXPECT_GE(plain, depth * activation);       // one for each layer
  EXPECT_LE(less, (6 + 6 + 8) * activation);  // one for each part, and one part's layers
}

TEST(RecomputeTest, GoesBackTwiceWhereTheGraphIsRetained) {
  nn::Sequential net = make_part();
  const at::Tensor x = input_of();
  const at::Tensor value = recompute(net, x).sum();
  value.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  value.backward();
  EXPECT_TRUE(at::equal(x.grad(), once + once));
  COHORT_EXPECT_THROW_WITH(value.backward(), c10::Error, "backward through the graph a second time");
}

TEST(RecomputeTest, AutogradGradAndBackwardWithInputsAskForSomeGradients) {
  nn::Sequential net = make_part(0);
  at::Tensor x = input_of();
  const std::vector<at::Tensor> wanted{x, net->parameters()[1]};
  const auto plain = torch::autograd::grad({net->forward(x).square().sum()}, wanted);
  expect_equal(torch::autograd::grad({recompute(net, x).square().sum()}, wanted), plain);
  const at::Tensor loss = recompute(net, x).square().sum();
  loss.backward({}, true, false, {{x}});
  EXPECT_TRUE(at::equal(x.grad(), plain[0]));
  for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(RecomputeTest, WhatItCannotDoIsRejected) {
  nn::Sequential net = make_part();
  const at::Tensor x = input_of();
  const at::Tensor loss = recompute(net, x).sum();
  COHORT_EXPECT_THROW_WITH(loss.backward({}, true, /*create_graph=*/true), UsageError,
                           "backward with create_graph goes through a recomputed part");
  const at::Tensor outside = x.exp();
  COHORT_EXPECT_THROW_WITH(recompute([&](const at::Tensor& t) { return t * outside; }, x), UsageError,
                           "fn uses a tensor with a graph of its own (ExpBackward0) that is not an input");
  for (const at::Tensor& input : {input_of(false), input_of() * 1}) {
    COHORT_EXPECT_THROW_WITH(recompute([](const at::Tensor& t) { return t.mul_(2); }, input), UsageError,
                             "fn changed its input 0 Float[4, 6] in place");
  }
}

TEST(RecomputeTest, ASecondRunThatDiffersIsRejected) {
  nn::Linear layer(6, 6);
  at::Tensor x = input_of();
  {
    const at::Tensor value = recompute(layer, x);
    const at::NoGradGuard no_grad;
    layer->weight.add_(1);
    const at::AutoGradMode on(true);
    COHORT_EXPECT_THROW_WITH(value.sum().backward(), UsageError,
                             "a parameter Float[6, 6] that fn uses was changed between its two runs");
  }
  std::int64_t rows = 4;
  const auto narrow = [&](const at::Tensor& t) { return layer(t.narrow(0, 0, rows--)); };
  COHORT_EXPECT_THROW_WITH(recompute(narrow, x).sum().backward(), UsageError,
                           "result 0 of fn was Float[4, 6], and when it ran again in backward Float[3, 6]");
  const auto more = [&](const at::Tensor& t) {
    return std::vector<at::Tensor>(static_cast<std::size_t>(rows++), layer(t));
  };
  COHORT_EXPECT_THROW_WITH(recompute(more, x)[0].sum().backward(), UsageError,
                           "fn returned 2 tensors, and 3 when it ran again in backward");
  {
    const at::Tensor value = recompute(layer, x.detach().requires_grad_());
    at::Tensor changed = input_of(false);
    const at::Tensor other = recompute(layer, changed);
    changed.add_(1);
    COHORT_EXPECT_THROW_WITH(other.sum().backward(), c10::Error, "modified by an inplace operation");
    value.sum().backward();
  }
}

TEST(RecomputeTest, AnErrorOfTheSecondRunLeavesTheGeneratorAlone) {
  const at::Tensor x = input_of();
  bool fails = false;
  const at::Tensor value = recompute(
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

// A result that is an input, or a view of one, is just that: who writes to either changes both.
TEST(RecomputeTest, ResultsThatAreInputsOrViewsOfThemSeeEachOther) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> functions = {
      [](const at::Tensor& x) { return x; },
      [](const at::Tensor& x) { return x.view({-1}); },
      [](const at::Tensor& x) { return x.select(0, 0); },
      [](const at::Tensor& x) { return x.t().slice(0, 1); },
  };
  for (std::size_t i = 0; i < functions.size(); ++i) {
    for (const bool writes_to_input : {false, true}) {
      SCOPED_TRACE(base::concat("function ", i, writes_to_input ? ", writes to the input" : ""));
      const auto gradient = [&](bool plain) {
        const at::Tensor leaf = at::arange(6, at::kDouble).view({2, 3}).requires_grad_();
        const at::Tensor x = leaf * 1;
        at::Tensor y = plain ? functions[i](x) : recompute(functions[i], x);
        at::Tensor(writes_to_input ? x : y).mul_(3);
        ((x * x).sum() + (y * y * y).sum()).backward();
        return leaf.grad();
      };
      EXPECT_TRUE(at::equal(gradient(false), gradient(true))) << gradient(false) << gradient(true);
    }
  }
}

}  // namespace
}  // namespace cohort

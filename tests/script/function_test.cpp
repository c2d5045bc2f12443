#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <map>
#include <thread>

#include "cohort/autograd/recompute.h"
#include "cohort/base/error.h"
#include "cohort/script/script.h"
#include "nets.h"
#include "tests/support/contains.h"
#include "tests/support/throws.h"

namespace cohort::script {
namespace {

using test::contains;
using test::same_bits;

at::Tensor lecture(at::Tensor x) {
  for (int i = 0; i < 10; ++i) x = x * x;
  return x;
}

TEST(FunctionTest, ReplaysNoLongerRunTheCppBody) {
  int runs = 0;
  auto fast = script([&](const at::Tensor& x) {
    ++runs;
    return lecture(x);
  });
  for (int i = 0; i < 7; ++i) {
    const at::Tensor x = at::full({5}, 1.0 + 0.01 * i);
    EXPECT_TRUE(same_bits(fast(x), lecture(x)));
  }
  EXPECT_EQ(runs, 4) << "two recordings, and two replays that are verified";
  EXPECT_TRUE(contains(fast.explain(), "function: 1 of 8 programs")) << fast.explain();
  EXPECT_TRUE(contains(fast.explain(), "10 operators recorded")) << fast.explain();
}

TEST(FunctionTest, ASingleOperatorIsLeftAsItIs) {
  for (const std::int64_t min_operators : {1, 2, 3}) {
    int runs = 0;
    auto fast = script(
        [&](const at::Tensor& x) {
          ++runs;
          return min_operators == 3 ? x.neg().sin() : x * x;
        },
        ScriptOptions().min_operators(min_operators));
    for (int i = 0; i < 6; ++i) {
      const at::Tensor x = at::rand({4});
      EXPECT_TRUE(same_bits(fast(x), min_operators == 3 ? x.neg().sin() : x * x));
    }
    EXPECT_EQ(runs, min_operators == 1 ? 4 : 6);
    EXPECT_EQ(contains(fast.explain(), "calls run the function itself"), min_operators > 1) << fast.explain();
    EXPECT_TRUE(contains(fast.explain(), "program: ")) << "for save()";
  }
  auto none = script([](const at::Tensor& x) { return x; }, ScriptOptions().min_operators(-1));
  COHORT_EXPECT_THROW_WITH(none(at::ones({1})), UsageError, "min_operators -1");
}

// The names of operators that a profiler is told of, with their numbers of inputs.
class Observed {
 public:
  Observed() {
    names.clear();
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&see).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  ~Observed() { at::removeCallback(handle_); }
  Observed(const Observed&) = delete;
  Observed& operator=(const Observed&) = delete;
  static inline std::multimap<std::string, std::size_t> names;

 private:
  static std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& call) {
    names.emplace(call.name(), call.inputs().size());
    return nullptr;
  }
  at::CallbackHandle handle_;
};

TEST(FunctionTest, ProfilersAreToldOfReplayedOperators) {
  namespace nn = torch::nn;
  nn::Sequential net(nn::Linear(6, 5), nn::ReLU(), nn::Linear(5, 3));
  auto fast = script(net);
  const at::Tensor x = at::rand({4, 6});
  const auto step = [&](auto&& forward) {
    net->zero_grad();
    const at::Tensor y = forward(x);
    y.square().sum().backward();
    return net[0]->as<nn::Linear>()->weight.grad();
  };
  const auto replay = [&](const at::Tensor& input) { return fast(input); };
  for (int i = 0; i < 4; ++i) step(replay);
  const at::Tensor expected = step([&](const at::Tensor& input) { return net->forward(input); });
  {
    const Observed observed;
    EXPECT_TRUE(same_bits(step(replay), expected));
  }
  const auto count = [](const char* name) { return Observed::names.count(name); };
  EXPECT_EQ(count("aten::addmm"), 2U);
  EXPECT_EQ(count("aten::mm"), 3U);  // of backward
  EXPECT_EQ(count("aten::threshold_backward"), 1U);
  EXPECT_EQ(count("aten::relu"), 1U);
  EXPECT_GE(Observed::names.find("aten::addmm")->second, 5U);
  EXPECT_TRUE(same_bits(step(replay), expected));
}

TEST(FunctionTest, ReturnsNestedResultsOfSeveralInputs) {
  auto fast = script([](const at::Tensor& a, const at::Tensor& b) {
    return std::tuple<at::Tensor, std::vector<at::Tensor>>(a + b, (a * b).chunk(2));
  });
  for (int i = 0; i < 4; ++i) {
    const at::Tensor a = at::rand({4}), b = at::rand({4});
    const auto [sum, halves] = fast(a, b);
    EXPECT_TRUE(same_bits(sum, a + b));
    ASSERT_EQ(halves.size(), 2U);
    EXPECT_TRUE(same_bits(halves[1], (a * b).slice(0, 2)));
  }
}

// Parameters' gradients, the input's, and the loss, of 100 calls.
template <typename Make>
void expect_same_gradients(const Make& make, at::IntArrayRef size, int calls) {
  std::vector<std::vector<at::Tensor>> found;
  std::string explained;
  for (const bool scripted : {false, true}) {
    at::manual_seed(1);
    auto model = make();
    auto fast = script(model);
    at::manual_seed(2);
    auto& all = found.emplace_back();
    for (int i = 0; i < calls; ++i) {
      const at::Tensor x = at::randn(size).requires_grad_();
      const at::Tensor loss = (scripted ? fast(x) : model->forward(x)).square().mean();
      loss.backward();
      all.push_back(loss.detach());
      all.push_back(x.grad());
      for (at::Tensor& parameter : model->parameters()) {
        all.push_back(parameter.grad().clone());
        const at::NoGradGuard no_grad;
        parameter.sub_(parameter.grad(), 0.01);
        parameter.mutable_grad().reset();
      }
    }
    for (const at::Tensor& buffer : model->buffers()) all.push_back(buffer);
    explained = fast.explain();
  }
  EXPECT_TRUE(contains(explained, "values saved for backward")) << explained;
  EXPECT_TRUE(same_bits(found[0], found[1])) << explained;
}

TEST(FunctionTest, ForwardAndBackwardAreEagersBitForBit) {
  expect_same_gradients([] { return test::small_mlp(); }, {16, 32}, 100);
  expect_same_gradients([] { return test::small_conv_net(); }, {4, 3, 12, 12}, 50);
  expect_same_gradients([] { return test::Encoder(); }, {6, 4, 32}, 50);
}

TEST(FunctionTest, HooksOnParametersFireAndFrozenOnesGetNoGradient) {
  auto model = test::small_mlp();
  model->parameters()[0].set_requires_grad(false);
  int fired = 0;
  model->parameters()[1].register_hook([&](const at::Tensor& gradient) {
    ++fired;
    return gradient * 2;
  });
  auto fast = script(model);
  for (int i = 0; i < 6; ++i) {
    model->zero_grad();
    fast(at::randn({16, 32})).sum().backward();
    EXPECT_FALSE(model->parameters()[0].grad().defined());
    EXPECT_TRUE(model->parameters()[1].grad().defined());
  }
  EXPECT_EQ(fired, 6);
  EXPECT_TRUE(contains(fast.explain(), "program:")) << fast.explain();
}

TEST(FunctionTest, AParameterBehindAnUnusedResultGetsNoGradient) {
  const at::Tensor a = at::ones({3}).requires_grad_(), b = at::ones({3}).requires_grad_();
  auto fast = script([=](const at::Tensor& x) { return std::pair(x * a, x * b); });
  for (int i = 0; i < 5; ++i) {
    a.mutable_grad().reset();
    fast(at::rand({3})).first.sum().backward();
    EXPECT_TRUE(a.grad().defined());
    EXPECT_FALSE(b.grad().defined());
  }
  EXPECT_TRUE(contains(fast.explain(), "program:")) << fast.explain();
  fast(at::rand({3})).second.sum().backward();
  EXPECT_TRUE(b.grad().defined());
}

TEST(FunctionTest, RetainGraphSecondBackwardAndCreateGraph) {
  const at::Tensor w = at::rand({3}).requires_grad_();
  auto fast = script([=](const at::Tensor& x) { return (x * w).sigmoid(); });
  for (int i = 0; i < 4; ++i) {
    w.mutable_grad().reset();
    const at::Tensor y = fast(at::ones({3}));
    y.sum().backward({}, /*retain_graph=*/true);
    const at::Tensor once = w.grad().clone();
    y.sum().backward();
    EXPECT_TRUE(same_bits(w.grad(), once * 2));
    COHORT_EXPECT_THROW_WITH(y.sum().backward(), UsageError, "second backward");
    const at::Tensor again = fast(at::ones({3})).sum();
    COHORT_EXPECT_THROW_WITH(torch::autograd::grad({again}, {w}, {}, true, true), UsageError, "create_graph");
  }
}

// The results lead to different weights, so what backward needs stays until both have been gone through.
TEST(FunctionTest, ASecondBackwardThroughOneOfSeveralResultsIsRejected) {
  const at::Tensor a = at::rand({3}).requires_grad_(), b = at::rand({3}).requires_grad_();
  auto fast = script([=](const at::Tensor& x) { return std::pair((x * a).sigmoid(), (x * b).tanh()); });
  for (int i = 0; i < 9; ++i) {
    a.mutable_grad().reset();
    const auto [y, z] = fast(at::ones({3}));
    (y * 3).sum().backward();
    const at::Tensor once = a.grad().clone();
    COHORT_EXPECT_THROW_WITH((y * 5).sum().backward(), UsageError, "second backward");
    EXPECT_TRUE(same_bits(a.grad(), once)) << i;
    z.sum().backward();
    EXPECT_TRUE(b.grad().defined());
  }
}

TEST(FunctionTest, TwoGraphsCanBeAliveAtOnce) {
  const at::Tensor w = at::rand({3}).requires_grad_();
  const auto fn = [=](const at::Tensor& x) { return (x * w).exp(); };
  auto fast = script(fn);
  for (int i = 0; i < 5; ++i) {
    const at::Tensor a = at::rand({3}), b = at::rand({3});
    w.mutable_grad().reset();
    (fn(a) + fn(b)).sum().backward();
    const at::Tensor expected = w.grad().clone();
    w.mutable_grad().reset();
    (fast(a) + fast(b)).sum().backward();
    EXPECT_TRUE(at::allclose(w.grad(), expected));
  }
}

TEST(FunctionTest, BackwardSeesThatWhatItReadsWasChangedInPlace) {
  const at::Tensor w = at::rand({3}).requires_grad_();
  auto fast = script([=](const at::Tensor& x) { return (x * w).sigmoid(); });
  for (int i = 0; i < 5; ++i) {
    const at::Tensor x = at::ones({3});
    at::Tensor y = fast(x);
    y.detach().add_(1);  // the result is what sigmoid's backward reads
    EXPECT_THROW(y.sum().backward(), std::exception);
    y = fast(x);
    x.add_(1);
    EXPECT_THROW(y.sum().backward(), std::exception);
    fast(x).sum().backward();
  }
  EXPECT_TRUE(contains(fast.explain(), "program:")) << fast.explain();
}

TEST(FunctionTest, InPlaceEffectsOnCapturedTensorsInputsAndViewsHappenInOrder) {
  const at::NoGradGuard no_grad;
  const auto body = [](at::Tensor& state, const at::Tensor& x) {
    state.mul_(0.5).add_(x);
    const at::Tensor row = state.view({2, 2})[1];
    row.add_(1);
    at::Tensor y = state.clone();
    y.unsqueeze_(0);
    y.select(1, 0).zero_();
    x.add_(y[0], 0.25);
    at::Tensor out = at::empty({0});
    return at::mul_out(out, y, y.squeeze(0));
  };
  at::Tensor eager_state = at::ones({4}), state = at::ones({4});
  auto fast = script([&](const at::Tensor& x) { return body(state, x); });
  for (int i = 0; i < 8; ++i) {
    const at::Tensor a = at::full({4}, 0.1 * i), b = a.clone();
    const auto version = b._version();
    EXPECT_TRUE(same_bits(body(eager_state, a), fast(b)));
    EXPECT_TRUE(same_bits(a, b));
    EXPECT_GT(b._version(), version);
    EXPECT_TRUE(same_bits(eager_state, state));
  }
  EXPECT_TRUE(contains(fast.explain(), "program:")) << fast.explain();
}

TEST(FunctionTest, NumbersOfCppThatChangeKeepTheFunctionEagerAndNameTheOperator) {
  double counter = 0;
  auto fast = script([&](const at::Tensor& x) { return x + (counter += 1); });
  for (int i = 1; i <= 8; ++i) EXPECT_EQ(fast(at::zeros({2}))[0].item<float>(), i);
  EXPECT_TRUE(contains(fast.explain(), "aten::add.")) << fast.explain();
  EXPECT_TRUE(contains(fast.explain(), "recordings differ")) << fast.explain();

  int calls = 0;
  auto made =
      script([&](const at::Tensor& x) { return x * torch::tensor({1.0F, static_cast<float>(++calls)}); });
  for (int i = 1; i <= 8; ++i) EXPECT_EQ(made(at::ones({2}))[1].item<float>(), i);
  EXPECT_TRUE(contains(made.explain(), "recordings differ")) << made.explain();
}

TEST(FunctionTest, TensorsMadeInCppWithTheSameContentsAreConstants) {
  auto fast = script([](const at::Tensor& x) { return x * torch::tensor({1.0F, 2.0F}) + 0.5; });
  for (int i = 0; i < 6; ++i) {
    const at::Tensor x = at::rand({2});
    EXPECT_TRUE(same_bits(fast(x), x * torch::tensor({1.0F, 2.0F}) + 0.5));
  }
  EXPECT_TRUE(contains(fast.explain(), "program:")) << fast.explain();
}

TEST(FunctionTest, InputsMayBeginAnywhereInTheirStorages) {
  const at::Tensor all = at::rand({40, 4});
  const auto body = [](const at::Tensor& x) { return x.slice(0, 1).t().mul(x.narrow(0, 0, 3).sum(1)); };
  int runs = 0;
  auto fast = script([&](const at::Tensor& x) {
    ++runs;
    return body(x);
  });
  for (int i = 0; i < 10; ++i) {
    const at::Tensor part = all.narrow(0, 4 * i, 4);
    EXPECT_TRUE(same_bits(fast(part), body(part))) << i;
  }
  EXPECT_EQ(runs, 5) << "calls 1, 2, 3, 4 and 8";
}

TEST(FunctionTest, AnIfOnATensorStaysEager) {
  auto fast = script([](const at::Tensor& x) { return (x.sum() > 0).item<bool>() ? x * 2 : x * 3; });
  for (int i = 0; i < 6; ++i) {
    const float sign = i % 2 == 0 ? 1.0F : -1.0F;
    EXPECT_EQ(fast(at::full({1}, sign)).item<float>(), i % 2 == 0 ? 2.0F : -3.0F);
  }
  EXPECT_TRUE(contains(fast.explain(), "_local_scalar_dense")) << fast.explain();
}

TEST(FunctionTest, AStateThatIsMadeLazilyTakesThreeRecordings) {
  at::Tensor mask;
  int runs = 0;
  auto fast = script([&](const at::Tensor& x) {
    ++runs;
    if (!mask.defined()) mask = at::ones({3}) * 2;
    return x * mask + 0;
  });
  for (int i = 0; i < 8; ++i) EXPECT_EQ(fast(at::ones({3}))[0].item<float>(), 2);
  EXPECT_EQ(runs, 5) << "three recordings, and two replays that are verified";
}

TEST(FunctionTest, AVerificationFindsThatCppDoesSomethingElseNow) {
  double factor = 2;
  auto fast = script([&](const at::Tensor& x) { return x * factor; },
                     ScriptOptions().verify_every(4).min_operators(0));
  for (int i = 0; i < 5; ++i) fast(at::ones({2}));
  factor = 3;
  for (int i = 0; i < 8; ++i) fast(at::ones({2}));
  EXPECT_EQ(fast(at::ones({2}))[0].item<float>(), 3);
  EXPECT_TRUE(contains(fast.explain(), "a verification found")) << fast.explain();
}

TEST(FunctionTest, AHookWithinTheFunctionStaysEager) {
  const at::Tensor w = at::ones({2}).requires_grad_();
  int fired = 0;
  auto fast = script([&](const at::Tensor& x) {
    const at::Tensor y = x * w;
    y.register_hook([&](const at::Tensor& gradient) {
      ++fired;
      return gradient;
    });
    return y * 2;
  });
  for (int i = 0; i < 5; ++i) fast(at::ones({2})).sum().backward();
  EXPECT_EQ(fired, 5);
  EXPECT_TRUE(contains(fast.explain(), "a hook within")) << fast.explain();
}

TEST(FunctionTest, RecomputationAndTensorsFromNowhereStayEager) {
  auto recomputed = script([](const at::Tensor& x) {
    return autograd::recompute([](const at::Tensor& t) { return at::dropout(t, 0.5, true); }, x);
  });
  for (int i = 0; i < 5; ++i) recomputed(at::ones({8}).requires_grad_()).sum().backward();
  EXPECT_TRUE(contains(recomputed.explain(), "autograd::recompute within")) << recomputed.explain();

  std::vector<float> memory = {1, 2};
  auto blob = script([&](const at::Tensor& x) { return x * at::from_blob(memory.data(), {2}); });
  for (int i = 0; i < 6; ++i) blob(at::ones({2}));
  memory[1] = 5;
  EXPECT_EQ(blob(at::ones({2}))[1].item<float>(), 5);
  EXPECT_TRUE(contains(blob.explain(), "comes from no operator")) << blob.explain();
}

TEST(FunctionTest, NestedScriptsAndExceptionsWhileRecording) {
  auto inner = script([](const at::Tensor& x) { return x.exp(); });
  int calls = 0;
  auto outer = script([&](const at::Tensor& x) {
    if (++calls == 2) throw std::runtime_error("the second call fails");
    return inner(x) * 2;
  });
  const at::Tensor x = at::rand({3});
  for (int i = 1; i <= 8; ++i) {
    if (i == 2) {
      EXPECT_THROW(outer(x), std::runtime_error);
    } else {
      EXPECT_TRUE(same_bits(outer(x), x.exp() * 2));
    }
  }
  EXPECT_EQ(calls, 5) << "one that throws, two recordings, and two replays that are verified";
  EXPECT_TRUE(contains(outer.explain(), "program: ")) << outer.explain();
}

TEST(FunctionTest, OneProgramRunsOnSeveralThreadsAtOnce) {
  at::manual_seed(1);
  const at::Tensor w = at::rand({8, 8}).requires_grad_();
  const auto fn = [=](const at::Tensor& x) { return at::mm(x, w).relu().mul(x); };
  auto fast = script(fn);
  const at::Tensor x = at::rand({4, 8});
  for (int i = 0; i < 3; ++i) fast(x).sum().backward();
  ASSERT_TRUE(contains(fast.explain(), "program:")) << fast.explain();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      const at::Tensor input = x * (t + 1);
      const auto expected = torch::autograd::grad({fn(input).sum()}, {w});
      for (int i = 0; i < 200; ++i) {
        if (!same_bits(torch::autograd::grad({fast(input).sum()}, {w})[0], expected[0])) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(FunctionTest, ShapesThatNoCallAsksForAnyMoreMakeRoomForNewOnes) {
  const at::NoGradGuard no_grad;
  auto fast = script([](const at::Tensor& x) { return x.exp() * x; }, ScriptOptions().max_programs(2));
  const auto call = [&](std::int64_t size, int times) {
    for (int i = 0; i < times; ++i) {
      const at::Tensor x = at::full({size}, 1.0 + i);
      EXPECT_TRUE(same_bits(fast(x), x.exp() * x)) << size << " " << i;
    }
  };
  call(1, 3);
  call(2, 3);
  call(3, 200);
  EXPECT_FALSE(contains(fast.explain(), "Float [3]")) << "the others may come back";
  call(2, 1);
  call(3, 100);
  EXPECT_TRUE(contains(fast.explain(), "Float [3]; without gradients\n    program: ")) << fast.explain();
  EXPECT_FALSE(contains(fast.explain(), "Float [1]")) << "not asked for in 256 calls";
  EXPECT_TRUE(contains(fast.explain(), "Float [2]"));
}

TEST(FunctionTest, ForwardsWithoutBackwardStayEagerAndSayWhy) {
  const at::Tensor w = at::ones({2}).requires_grad_();
  auto fast = script([=](const at::Tensor& x) { return x * w; });
  for (int i = 0; i < 20; ++i) fast(at::ones({2}));
  EXPECT_TRUE(contains(fast.explain(), "no backward followed")) << fast.explain();
  for (int i = 0; i < 40; ++i) fast(at::ones({2})).sum().backward();  // a training that begins later
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

}  // namespace
}  // namespace cohort::script

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/optim/sgd.h"
#include "cohort/script/script.h"
#include "cohort/script/step.h"
#include "tests/script/like_eager.h"
#include "tests/support/contains.h"
#include "tests/support/throws.h"

// Hooks that update the weight whose gradient they get, while backward continues ("optimizer in backward").
namespace cohort::script {
namespace {

using test::contains;
using test::same_bits;

// Runs after the gradient of a leaf was accumulated.
struct UpdateAfterwards : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable& leaf) override {
    const at::NoGradGuard no_grad;
    at::Tensor(leaf).sub_(leaf.grad() * 0.5);
    leaf.mutable_grad().reset();
  }
};

enum class Hook : std::uint8_t { kOnGradient, kAfterAccumulation };

void update_in_backward(const at::Tensor& w, Hook hook) {
  if (hook == Hook::kAfterAccumulation) {
    torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<UpdateAfterwards>());
    return;
  }
  // The tensor without its hooks: one that holds itself would never go.
  const at::Tensor alias = w.detach();
  w.register_hook([alias](const at::Tensor& gradient) {
    const at::NoGradGuard no_grad;
    at::Tensor(alias).sub_(gradient * 0.5);
    return gradient;
  });
}

using Fn = std::function<at::Tensor(const Tensors& weights, const at::Tensor& x)>;
struct NamedFn {
  const char* name;
  Fn fn;
};
const std::vector<NamedFn> kHookedFunctions = {
    {"w.mm(x)", [](const Tensors& w, const at::Tensor& x) { return w[0].mm(x).mul(2); }},
    {"x.mm(w)", [](const Tensors& w, const at::Tensor& x) { return x.mm(w[0]).mul(2); }},
    {"linear", [](const Tensors& w, const at::Tensor& x) { return at::linear(x, w[0]).mul(2); }},
    {"w * x", [](const Tensors& w, const at::Tensor& x) { return w[0].mul(x).mul(2); }},
    {"x * w", [](const Tensors& w, const at::Tensor& x) { return x.mul(w[0]).mul(2); }},
    {"x * w.t()", [](const Tensors& w, const at::Tensor& x) { return x.mul(w[0].t()).mul(2); }},
    {"x.mm(w[:, :]).relu()",
     [](const Tensors& w, const at::Tensor& x) { return x.mm(w[0].slice(1, 0, 512)).relu(); }},
    {"x / w", [](const Tensors& w, const at::Tensor& x) { return (x / (w[0] + 2)).mul(w[1]); }},
    {"two weights", [](const Tensors& w, const at::Tensor& x) { return x.mm(w[0]).tanh().mm(w[1]); }},
    {"two layers", [](const Tensors& w,
                      const at::Tensor& x) { return at::linear(at::linear(x, w[0]).relu(), w[1]).sin(); }},
    {"a weight twice",
     [](const Tensors& w, const at::Tensor& x) { return x.mm(w[0]).mul(0.1).mm(w[0]).add(w[1]); }},
};

Tensors train(const Fn& fn, Hook hook, std::int64_t chunk, bool is_scripted) {
  at::manual_seed(1);
  const Tensors weights = {at::randn({12, 12}).requires_grad_(), at::randn({12, 12}).requires_grad_()};
  for (const at::Tensor& w : weights) update_in_backward(w, hook);
  const auto call = [=](const at::Tensor& x) { return fn(weights, x); };
  auto fast = script(call, ScriptOptions().gradient_chunk_bytes(chunk));
  Tensors seen;
  for (int i = 0; i < 8; ++i) {
    at::manual_seed(i + 5);
    for (const at::Tensor& w : weights) {
      const at::NoGradGuard no_grad;
      at::Tensor(w).mul_(0.9);
    }
    const at::Tensor x = at::randn({12, 12}).requires_grad_();
    (is_scripted ? fast(x) : call(x)).sum().backward();
    seen.push_back(x.grad());
    for (const at::Tensor& w : weights) {
      seen.push_back(w.detach().clone());
      seen.push_back(w.grad().defined() ? w.grad().clone() : at::Tensor());
    }
  }
  return seen;
}

TEST(GradientHooksTest, ThatUpdateTheirWeightLeaveTheOtherGradientsRight) {
  for (const auto& [name, fn] : kHookedFunctions) {
    for (const Hook hook : {Hook::kOnGradient, Hook::kAfterAccumulation}) {
      for (const std::int64_t chunk : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1} << 20}) {
        SCOPED_TRACE(std::string(name) + ", chunks of " + std::to_string(chunk));
        EXPECT_TRUE(same_bits(train(fn, hook, chunk, false), train(fn, hook, chunk, true)));
      }
    }
  }
}

// The weight whose gradient is found first steps the other one, which backward still reads: eager mode
// throws.
TEST(GradientHooksTest, ThatUpdateAWeightWhichBackwardStillReadsAreAnError) {
  for (const bool steps_what_is_read : {true, false}) {
    const Tensors w = {at::rand({4, 4}).requires_grad_(), at::rand({4, 4}).requires_grad_()};
    const at::Tensor stepped = w[steps_what_is_read ? 0 : 1].detach();
    bool is_on = false;
    w[1].register_hook([&, stepped](const at::Tensor& gradient) {
      if (is_on) at::Tensor(stepped).sub_(0.5);
      return gradient;
    });
    const auto fn = [=](const at::Tensor& x) { return x.mm(w[0]).tanh().mm(w[1]).mul(2); };
    auto fast = script(fn, ScriptOptions().gradient_chunk_bytes(1));
    const auto step = [](auto&& run) {
      const at::Tensor x = at::ones({4, 4}).requires_grad_();
      run(x).sum().backward();
      return x.grad();
    };
    for (int call = 0; call < 6; ++call) step(fast);
    ASSERT_TRUE(contains(fast.explain(), "(in 2 parts)")) << fast.explain();
    is_on = true;
    if (steps_what_is_read) {
      EXPECT_THROW(step(fn), c10::Error);
      COHORT_EXPECT_THROW_WITH(step(fast), UsageError, "was changed in place since forward");
    } else {
      const at::Tensor expected = step(fn);
      at::Tensor(stepped).add_(0.5);  // as before that step
      EXPECT_TRUE(at::allclose(step(fast), expected));
    }
    is_on = false;
    step(fast);
  }
}

// Parts as large as those that the default cuts between.
TEST(GradientHooksTest, ThatUpdateALargeWeightLeaveTheGradientOfTheInputRight) {
  const auto run = [](bool is_scripted) {
    at::Tensor w = at::eye(512).requires_grad_();
    w.register_hook([alias = w.detach()](const at::Tensor& gradient) {
      const at::NoGradGuard no_grad;
      at::Tensor(alias).sub_(gradient * 100);
      return gradient;
    });
    const auto fn = [w](const at::Tensor& x) { return x.mm(w).mul(2); };
    auto fast = script(fn);
    Tensors found;
    for (int i = 0; i < 5; ++i) {
      const at::NoGradGuard no_grad;
      w.copy_(at::eye(512));
      const at::Tensor x = at::full({4, 512}, 0.01 * (i + 1)).requires_grad_();
      const at::AutoGradMode with_gradients(true);
      (is_scripted ? fast(x) : fn(x)).sum().backward();
      found.push_back(x.grad());
    }
    return found;
  };
  EXPECT_TRUE(same_bits(run(false), run(true)));
}

TEST(GradientHooksTest, OfAStepRunAfterTheirGradientWasAccumulated) {
  const auto run = [](bool is_scripted) {
    at::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 2));
    for (const at::Tensor& w : net->parameters()) update_in_backward(w, Hook::kAfterAccumulation);
    optim::SGD sgd(net->parameters(), optim::SGDOptions(0.1));
    const auto loss_of = [](const at::Tensor& y, const at::Tensor& target) {
      return (y - target).square().mean();
    };
    auto step = script_step(net, loss_of, sgd);
    Tensors seen;
    for (int i = 0; i < 8; ++i) {
      at::manual_seed(i);
      const at::Tensor x = at::randn({3, 4}), target = at::randn({3, 2});
      if (is_scripted) {
        seen.push_back(step(x, target));
      } else {
        sgd.zero_grad();
        const at::Tensor loss = loss_of(net->forward(x), target);
        loss.backward();
        sgd.step();
        seen.push_back(loss.detach());
      }
      for (const at::Tensor& w : net->parameters()) seen.push_back(w.detach().clone());
    }
    return seen;
  };
  EXPECT_TRUE(same_bits(run(false), run(true)));
}

// Leaves that say what hooks of theirs run, and with a gradient or without.
struct Told {
  explicit Told(std::vector<const char*> names) {
    for (const char* const name : names) {
      const at::Tensor leaf = at::full({3}, 0.5 + 0.25 * static_cast<double>(leaves.size())).requires_grad_();
      const auto tell = [this, name](const char* what, const at::Tensor& gradient) {
        events.push_back(std::string(what) + name + (gradient.defined() ? "" : " without a gradient"));
      };
      leaf.register_hook([tell](const at::Tensor& gradient) { tell("before ", gradient); });
      accumulators.push_back(torch::autograd::impl::grad_accumulator(leaf));
      using torch::autograd::variable_list;
      accumulators.back()->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [tell](const variable_list& outputs, const variable_list& inputs) {
            tell("after ", inputs.front());
            return outputs;
          }));
      leaves.push_back(leaf);
    }
  }
  Told(const Told&) = delete;
  Told& operator=(const Told&) = delete;

  Tensors leaves;
  std::vector<decltype(torch::autograd::impl::grad_accumulator(at::Tensor()))> accumulators;
  std::vector<std::string> events;
};

// Of each backward, what hooks ran, in any order, and the gradients that are there.
struct Seen {
  std::vector<std::vector<std::string>> events;
  Tensors gradients;
};

using Backward = std::function<void(int call, const Tensors& results)>;

// Results that lead to different leaves: the first to a and c, the second to b, c and, through an input with
// a graph of its own, to d, the third to c alone.
Seen hooks_of(bool is_scripted, std::int64_t chunk, const Backward& backward) {
  Told told({"a", "b", "c", "d"});
  const Tensors& w = told.leaves;
  const auto fn = [w](const at::Tensor& x, const at::Tensor& z) {
    const at::Tensor shared = (x * w[2]).tanh();
    return Tensors{shared * w[0], (shared * w[1]).exp() + z, shared.sum()};
  };
  auto fast = script(fn, ScriptOptions().gradient_chunk_bytes(chunk).min_operators(0));
  Seen seen;
  for (int call = 0; call < 20; ++call) {
    const at::Tensor x = at::arange(1, 4) * (0.1 * (call + 1)), z = w[3].cos();
    told.events.clear();
    backward(call, is_scripted ? fast(x, z) : fn(x, z));
    std::ranges::sort(told.events);
    seen.events.push_back(told.events);
    for (const at::Tensor& leaf : w) {
      const at::Tensor gradient = leaf.grad();
      seen.gradients.push_back(gradient.defined() ? gradient.clone() : gradient);
      if (call % 2 == 0) leaf.mutable_grad().reset();
    }
  }
  EXPECT_TRUE(!is_scripted || fast.explain().find("program:") != std::string::npos) << fast.explain();
  return seen;
}

void expect_hooks_of_eager(const Backward& backward) {
  const Seen expected = hooks_of(false, 0, backward);
  for (const std::int64_t chunk : {0, 1}) {
    const Seen found = hooks_of(true, chunk, backward);
    EXPECT_EQ(found.events, expected.events);
    EXPECT_TRUE(same_bits(found.gradients, expected.gradients));
  }
}

// The loss of a call is made of some of the results: of each set of them in turn.
at::Tensor loss_of(int call, const Tensors& results) {
  at::Tensor loss = at::zeros({});
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (((call % 7 + 1) >> i & 1) != 0) loss = loss + results[i].square().sum();
  }
  return loss;
}

TEST(GradientHooksTest, RunForLeavesThatTheLossIsMadeOfAndNoOthers) {
  expect_hooks_of_eager([](int call, const Tensors& results) { loss_of(call, results).backward(); });
  expect_hooks_of_eager([](int /*call*/, const Tensors& results) { loss_of(0, results).backward(); });
}

TEST(GradientHooksTest, RunForLeavesOfEachLossWhereOneGraphGoesBackwardTwice) {
  expect_hooks_of_eager([](int call, const Tensors& results) {
    loss_of(call, results).backward({}, /*retain_graph=*/true);
    loss_of(call + 3, results).backward({}, /*retain_graph=*/true);
    loss_of(call, results).backward();
  });
}

// What another thread makes of a result has numbers of its own in autograd's order, and comes late.
TEST(GradientHooksTest, RunOnceWhereTheGradientOfAResultComesLate) {
  expect_hooks_of_eager([](int /*call*/, const Tensors& results) {
    at::Tensor late;
    std::thread([&] { late = results[1].square().sum(); }).join();
    (results[0].sum() + results[2] + late).backward();
  });
}

TEST(GradientHooksTest, OnWhatAnInputWasMadeOfAreNoneOfTheFunctions) {
  int hooks = 0;
  auto fast = script([](const at::Tensor& x) { return x.exp() * x; });
  for (int call = 0; call < 8; ++call) {
    const at::Tensor leaf = at::full({3}, 0.1 * call).requires_grad_(), x = leaf.sin();
    x.register_hook([&](const at::Tensor& gradient) {
      ++hooks;
      return gradient * 2;
    });
    fast(x.tanh()).sum().backward();
    EXPECT_EQ(hooks, call + 1);
  }
  EXPECT_NE(fast.explain().find("program: "), std::string::npos) << fast.explain();
}

TEST(GradientHooksTest, TwoLossesOfSeparateResultsGoBackwardOneAfterTheOther) {
  const at::Tensor a = at::ones({3}).requires_grad_(), b = at::ones({3}).requires_grad_();
  auto fast =
      script([&](const at::Tensor& x) { return std::vector<at::Tensor>{(x * a).exp(), (x * b).sin()}; });
  for (int call = 0; call < 8; ++call) {
    a.mutable_grad().reset(), b.mutable_grad().reset();
    const at::Tensor x = at::arange(3) * 0.1 * call;
    const auto y = fast(x);
    y[0].square().sum().backward();
    EXPECT_TRUE(at::allclose(a.grad(), 2 * x * (2 * x).exp()));
    EXPECT_FALSE(b.grad().defined());
    y[1].square().sum().backward();
    EXPECT_TRUE(at::allclose(b.grad(), 2 * x * x.sin() * x.cos()));
    EXPECT_ANY_THROW(y[1].square().sum().backward());
  }
  EXPECT_NE(fast.explain().find("program: "), std::string::npos) << fast.explain();
}

}  // namespace
}  // namespace cohort::script

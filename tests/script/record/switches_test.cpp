#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "cohort/optim/sgd.h"
#include "cohort/script/internal/record/guard.h"
#include "cohort/script/script.h"
#include "cohort/script/step.h"
#include "tests/script/like_eager.h"
#include "tests/support/contains.h"

// What changes between calls beside the inputs: LibTorch's switches, training flags, forward-mode gradients.
namespace cohort::script {
namespace {

using test::Body;
using test::contains;
using test::same_bits;

struct Switch {
  const char* name;
  std::function<bool()> get;
  std::function<void(bool)> set;
};

const std::vector<Switch>& switches() {
  static at::Context& context = at::globalContext();
  static const std::vector<Switch> all = {
      {"setUserEnabledMkldnn", [] { return context.userEnabledMkldnn(); },
       [](bool on) { context.setUserEnabledMkldnn(on); }},
      {"setDeterministicMkldnn", [] { return context.deterministicMkldnn(); },
       [](bool on) { context.setDeterministicMkldnn(on); }},
      {"setUserEnabledCuDNN", [] { return context.userEnabledCuDNN(); },
       [](bool on) { context.setUserEnabledCuDNN(on); }},
      {"setSDPUseFlash", [] { return context.userEnabledFlashSDP(); },
       [](bool on) { context.setSDPUseFlash(on); }},
      {"setSDPUseMemEfficient", [] { return context.userEnabledMemEfficientSDP(); },
       [](bool on) { context.setSDPUseMemEfficient(on); }},
      {"setSDPUseMath", [] { return context.userEnabledMathSDP(); },
       [](bool on) { context.setSDPUseMath(on); }},
      {"setSDPUseCuDNN", [] { return context.userEnabledCuDNNSDP(); },
       [](bool on) { context.setSDPUseCuDNN(on); }},
      {"setAllowFP16BF16ReductionMathSDP", [] { return context.allowFP16BF16ReductionMathSDP(); },
       [](bool on) { context.setAllowFP16BF16ReductionMathSDP(on); }},
      {"setDeterministicAlgorithms", [] { return context.deterministicAlgorithms(); },
       [](bool on) { context.setDeterministicAlgorithms(on, false); }},
  };
  return all;
}

// Some change no number on a CPU, and would pass the tests below unseen.
TEST(SwitchesTest, EachMakesAnotherEnvironment) {
  for (const Switch& each : switches()) {
    const std::string name = each.name;
    const bool is_of_gpus = contains(name, "CuDNN") || contains(name, "MemEfficient");
    if (is_of_gpus && !at::hasCUDA()) continue;
    const bool before = each.get();
    const Environment now = Environment::now();
    each.set(!before);
    const Environment turned = Environment::now();
    each.set(before);
    EXPECT_FALSE(now == turned) << name;
    EXPECT_TRUE(now == Environment::now()) << name;
  }
}

// Turns each switch after five calls, and back after eight.
void expect_like_eager_when_turned(const Body& body, const std::function<at::Tensor()>& input) {
  for (const Switch& each : switches()) {
    SCOPED_TRACE(each.name);
    const bool before = each.get();
    Function fast(body, ScriptOptions().min_operators(0));
    for (int call = 0; call < 10; ++call) {
      each.set(call >= 5 && call < 8 ? !before : before);
      at::manual_seed(call);
      const at::Tensor x = input();
      std::string expected_error, found_error;
      Tensors expected, found;
      expected_error = test::error_of([&] { expected = body({x}); });
      found_error = test::error_of([&] { found = fast({x}); });
      each.set(before);
      ASSERT_EQ(expected_error.empty(), found_error.empty()) << expected_error << found_error;
      ASSERT_TRUE(same_bits(expected, found)) << "call " << call << fast.explain();
      if (x.requires_grad()) {
        ASSERT_TRUE(same_bits(test::gradients_of(expected, {x}), test::gradients_of(found, {x}))) << call;
      }
    }
  }
}

TEST(SwitchesTest, ALayerWithAStateOfMkldnn) {
  at::manual_seed(1);
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(32, 64));
  const at::NoGradGuard no_grad;
  expect_like_eager_when_turned(
      [=](const Tensors& in) mutable { return Tensors{std::get<0>(lstm->forward(in[0])) * 1}; },
      [] { return at::randn({5, 4, 32}); });
}

TEST(SwitchesTest, AConvolutionAndALinearLayer) {
  at::manual_seed(1);
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 8, 3));
  torch::nn::Linear linear(36, 16);
  expect_like_eager_when_turned(
      [=](const Tensors& in) mutable {
        return Tensors{linear->forward(conv->forward(in[0]).flatten(2)).relu()};
      },
      [] { return at::randn({2, 3, 8, 8}).requires_grad_(); });
}

TEST(SwitchesTest, AttentionWithAndWithoutGradients) {
  for (const bool needs_gradient : {false, true}) {
    expect_like_eager_when_turned(
        [](const Tensors& in) { return Tensors{at::scaled_dot_product_attention(in[0], in[0], in[0]) * 1}; },
        [=] { return at::randn({2, 4, 64, 32}).requires_grad_(needs_gradient); });
  }
}

// What attention consists of where no kernel of its own is asked for.
TEST(SwitchesTest, AttentionOfHalfNumbersByItsFormula) {
  at::Context& context = at::globalContext();
  const bool before = context.userEnabledFlashSDP();
  context.setSDPUseFlash(false);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    expect_like_eager_when_turned(
        [](const Tensors& in) { return Tensors{at::scaled_dot_product_attention(in[0], in[0], in[0]) * 1}; },
        [=] { return at::randn({2, 2, 16, 8}).to(type); });
  }
  context.setSDPUseFlash(before);
}

TEST(SwitchesTest, IndicesThatDeterministicAlgorithmsAddInOrder) {
  expect_like_eager_when_turned(
      [](const Tensors& in) {
        const at::Tensor places = at::arange(64).remainder(7);
        return Tensors{at::zeros({7}).index_add(0, places, in[0]),
                       at::zeros({7}).scatter_add(0, places, in[0])};
      },
      [] { return at::randn({64}); });
}

struct DualLevel {
  DualLevel() = default;
  DualLevel(const DualLevel&) = delete;
  DualLevel& operator=(const DualLevel&) = delete;
  ~DualLevel() { torch::autograd::forward_ad::exit_dual_level(level); }
  std::uint64_t level = torch::autograd::forward_ad::enter_dual_level();
};

Tensors with_tangent(const at::Tensor& result, std::uint64_t level) {
  const auto [primal, grad_output] = at::_unpack_dual(result, level);
  return {primal.detach(), grad_output.defined() ? grad_output.detach() : at::Tensor()};
}

TEST(SwitchesTest, AStepWithAnInputThatHasATangentRunsItself) {
  at::manual_seed(1);
  auto model = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(8, 8), torch::nn::Tanh(),
                                                           torch::nn::Linear(8, 1));
  optim::SGD optimizer(model->parameters(), optim::SGDOptions(0.05));
  const auto loss = [](const at::Tensor& y, const at::Tensor& target) {
    return (y - target).pow(2).mean();  // mse_loss() itself rejects the tangent's zeros
  };
  auto step = script_step(torch::nn::Sequential(model), loss, optimizer);
  const at::Tensor x = at::rand({4, 8}), target = at::rand({4, 1});
  for (int call = 0; call < 20; ++call) {  // of the dual ones some are verified
    const DualLevel scope;
    const bool is_dual = call > 2 && call % 4 != 1;
    const at::Tensor loss_now = step(is_dual ? at::_make_dual(x, at::ones_like(x), scope.level) : x, target);
    EXPECT_TRUE(std::isfinite(loss_now.item<double>()));
  }
  EXPECT_TRUE(contains(step.explain(), "program: ")) << step.explain();
}

TEST(SwitchesTest, ForwardModeGradientsOfInputsAndOfWhatIsCaptured) {
  const at::Tensor plain = at::full({2}, 0.5);
  at::Tensor w = plain;
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> functions = {
      [](const at::Tensor& x) { return x.sin().mul(x); },
      [&](const at::Tensor& x) { return x.exp() * w; },
      [](const at::Tensor& x) { return x.detach().sin().mul(2); },
      [](const at::Tensor& x) { return x.view({2, 1}).expand({2, 3}).sum(1).mul(x); },
  };
  for (const auto& fn : functions) {
    for (const bool is_warm : {false, true}) {
      for (const bool has_gradients : {false, true}) {
        for (const bool is_captured : {false, true}) {
          if (is_captured && is_warm) continue;  // another captured tensor is another value of C++'s
          const at::AutoGradMode mode(has_gradients);
          auto fast = script([&](const at::Tensor& x) { return fn(x); }, ScriptOptions().min_operators(0));
          for (int call = 0; call < 10; ++call) {
            const bool is_dual = call < 5 ? !is_warm : is_warm;
            const DualLevel scope;
            const std::uint64_t level = scope.level;
            const auto dual = [&](const at::Tensor& t) {
              return is_dual ? at::_make_dual(t, at::full({2}, 1.0 + call), level) : t;
            };
            const at::Tensor x = is_captured ? at::full({2}, 0.25 * call) : dual(at::full({2}, 0.25 * call));
            w = is_captured ? dual(plain) : plain;
            const Tensors expected = with_tangent(fn(x), level), found = with_tangent(fast(x), level);
            ASSERT_TRUE(same_bits(expected, found))
                << call << is_warm << has_gradients << is_captured << fast.explain();
          }
        }
      }
    }
  }
}

struct WithDropoutImpl : torch::nn::Module {
  WithDropoutImpl() { register_module("dropout", dropout); }
  at::Tensor forward(const at::Tensor& x) { return dropout->forward(x) * 2 + (is_training() ? 1 : 0); }
  torch::nn::Dropout dropout{0.5};
};
TORCH_MODULE(WithDropout);

TEST(SwitchesTest, TrainingFlagsOfAModuleThatIsWatched) {
  const at::NoGradGuard no_grad;
  WithDropout net;
  auto fast = script(net);
  auto by_name = script([=](const at::Tensor& x) mutable { return net->forward(x).exp(); },
                        ScriptOptions().modules({net.ptr()}));
  for (int call = 0; call < 16; ++call) {
    net->train(call / 4 % 2 == 0);
    const at::Tensor x = at::full({8}, 1.0 + call);
    const auto seeded = [&](const auto& fn) {
      at::manual_seed(call);
      return fn();
    };
    EXPECT_TRUE(same_bits(seeded([&] { return net->forward(x); }), seeded([&] { return fast(x); }))) << call;
    EXPECT_TRUE(same_bits(seeded([&] { return net->forward(x).exp(); }), seeded([&] { return by_name(x); })))
        << call;
  }
}

TEST(SwitchesTest, InputsWhoseGradientIsWantedInSomeCalls) {
  const at::Tensor w = at::full({3}, 0.5).requires_grad_();
  const auto fn = [=](const at::Tensor& x) { return (x * w).exp() + x; };
  auto fast = script(fn);
  for (int call = 0; call < 16; ++call) {
    const auto seen = [&](auto&& run) {
      at::Tensor x = at::full({3}, 0.1 * call).requires_grad_(call % 3 != 0);
      w.mutable_grad().reset();
      const at::Tensor y = run(x);
      y.sum().backward();
      return Tensors{y, x.grad(), w.grad()};
    };
    EXPECT_TRUE(same_bits(seen(fn), seen(fast))) << call << fast.explain();
  }
}

}  // namespace
}  // namespace cohort::script

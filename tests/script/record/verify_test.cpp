#include "cohort/script/internal/record/verify.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "cohort/optim/sgd.h"
#include "cohort/script/script.h"
#include "cohort/script/step.h"
#include "tests/script/nets.h"
#include "tests/support/contains.h"

namespace cohort::script {
namespace {

using test::contains;
using test::same_bits;

// What no operator shows is found by a verification that compares results and effects.
TEST(VerifyTest, FindsReadsAndWritesThroughPointersAndSeedsSetInCpp) {
  const at::NoGradGuard no_grad;
  const auto option = ScriptOptions().verify_every(3).min_operators(0);
  const auto ends = [&](const Function::Run& run) {
    Function fast(run, option);
    for (int i = 0; i < 8; ++i) fast({at::full({4}, 1.0 + (i > 2 ? i : 0))});
    const at::Tensor x = at::full({4}, 9.0);
    at::manual_seed(1);
    const Tensors expected = run({x});
    at::manual_seed(1);
    EXPECT_TRUE(same_bits(fast({x}), expected)) << fast.explain();
    return fast.explain();
  };
  EXPECT_TRUE(contains(ends([](const Tensors& in) {
                         at::Tensor y = in[0] * 2;
                         y.data_ptr<float>()[0] += in[0].data_ptr<float>()[1];
                         return Tensors{y + 1};
                       }),
                       "a verification found that result 0 has other values"));
  EXPECT_TRUE(contains(ends([](const Tensors& in) { return Tensors{in[0] * in[0].data_ptr<float>()[0]}; }),
                       "a verification found"));
  EXPECT_TRUE(contains(ends([](const Tensors& in) {
                         return in[0].accessor<float, 1>()[0] > 2 ? Tensors{in[0] * 2} : Tensors{in[0] * 3};
                       }),
                       "a verification found"));
  EXPECT_TRUE(contains(ends([](const Tensors& in) {
                         at::manual_seed(3);
                         return Tensors{at::rand_like(in[0])};
                       }),
                       "a verification found that result 0"));
  at::Tensor state = at::zeros({4});
  EXPECT_TRUE(contains(ends([&](const Tensors& in) {
                         at::Tensor y = in[0] * 2;
                         y.data_ptr<float>()[0] = 7;
                         state.copy_(y);
                         return Tensors{in[0] + 1};
                       }),
                       "a verification found that a tensor Float [4] is left with other values"));
}

TEST(VerifyTest, ReplaysAreVerifiedAtCallThreeAndAtEachPowerOfTwo) {
  std::vector<int> ran;
  int call = 0;
  const auto body = [&](const at::Tensor& x) {
    ran.push_back(call);
    return x.exp() * x;
  };
  auto fast = script(body);
  auto unverified = script(body, ScriptOptions().verify(false));
  for (call = 1; call <= 70; ++call) fast(at::full({3}, 1.0 + call));
  EXPECT_EQ(ran, (std::vector<int>{1, 2, 3, 4, 8, 16, 32, 64}));
  ran.clear();
  for (call = 1; call <= 70; ++call) unverified(at::full({3}, 1.0 + call));
  EXPECT_EQ(ran, (std::vector<int>{1, 2}));
}

// A verified call returns the function's own result; one difference makes the shape eager.
TEST(VerifyTest, ADifferenceMakesOneShapeEagerAndReturnsTheFunctionsResult) {
  const at::NoGradGuard no_grad;
  const auto body = [](const at::Tensor& x) {
    at::Tensor y = x * 2;
    if (x.numel() == 4) y.data_ptr<float>()[0] += x.data_ptr<float>()[1];  // no operator shows it
    return y + 1;
  };
  auto fast = script(body);
  for (int call = 0; call < 6; ++call) {
    for (const std::int64_t size : {3, 4}) {
      const at::Tensor x = at::full({size}, 1.0 + call);
      EXPECT_TRUE(same_bits(fast(x), body(x))) << call;
    }
  }
  const std::string text = fast.explain();
  EXPECT_TRUE(contains(text, "Float [4]; without gradients\n    eager: a verification found that result 0"))
      << text;
  EXPECT_TRUE(contains(text, "Float [3]; without gradients\n    program: ")) << text;
}

// A backward that writes where no operator shows it.
struct SecretlyDoubled : torch::autograd::Function<SecretlyDoubled> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 1; }
  static Tensors backward(torch::autograd::AutogradContext*, const Tensors& gradients) {
    at::Tensor gradient = gradients[0] * 1;
    float* const data = gradient.data_ptr<float>();
    for (std::int64_t i = 0; i < gradient.numel(); ++i) data[i] *= 2;
    return {gradient};
  }
};

TEST(VerifyTest, FindsGradientsThatAreOthers) {
  auto fast = script([](const at::Tensor& x) { return SecretlyDoubled::apply(x * 3); },
                     ScriptOptions().verify_every(3));
  at::Tensor x = at::ones({4}).requires_grad_();
  for (int i = 0; i < 8; ++i) {
    x.mutable_grad().reset();
    fast(x).sum().backward();
  }
  EXPECT_TRUE(contains(fast.explain(), "a verification found that gradient 0 has other values"))
      << fast.explain();
  EXPECT_TRUE(same_bits(x.grad(), at::full({4}, 6.0)));
}

TEST(VerifyTest, OfASoundProgramLeavesNoTrace) {
  const auto trained = [](std::int64_t verify_every) {
    at::manual_seed(1);
    auto model = test::small_mlp();
    optim::SGD sgd(model->parameters(), optim::SGDOptions(0.05).momentum(0.9));
    auto step = script_step(model, test::cross_entropy, sgd, ScriptOptions().verify_every(verify_every));
    auto fast = script(model, ScriptOptions().verify_every(verify_every));
    at::manual_seed(7);
    Tensors all;
    for (int i = 0; i < 20; ++i) {
      const at::Tensor x = at::randn({16, 32}), y = at::randint(0, 10, {16});
      all.push_back(step(x, y));
      all.push_back(fast(x).sum());
      all.back().backward();
      const at::NoGradGuard no_grad;
      all.push_back(fast(x));
    }
    for (const at::Tensor& tensor : model->parameters()) all.push_back(tensor);
    for (const at::Tensor& tensor : model->buffers()) all.push_back(tensor);
    all.push_back(at::rand({2}));
    EXPECT_FALSE(contains(step.explain() + fast.explain(), "eager")) << step.explain() << fast.explain();
    return all;
  };
  const Tensors expected = trained(0), found = trained(3);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(expected[i], found[i])) << i;
}

// While a call is verified, other threads draw from LibTorch's generator: none of their numbers comes twice.
TEST(VerifyTest, LeavesTheGeneratorOfOtherThreadsAlone) {
  std::atomic<bool> stop{false};
  std::vector<std::int64_t> drawn;
  std::thread other([&] {
    while (!stop) drawn.push_back(at::randint(std::int64_t(1) << 62, {1}, at::kLong).item<std::int64_t>());
  });
  int ran = 0;
  for (int i = 0; i < 20; ++i) {
    auto fast = script([&](const at::Tensor& x) {
      ++ran;
      return at::dropout(x, 0.5, true).exp() * x;
    });
    for (int call = 0; call < 20; ++call) fast(at::ones({64}));
  }
  stop = true;
  other.join();
  EXPECT_GT(ran, 20 * 5);
  std::ranges::sort(drawn);
  EXPECT_TRUE(std::ranges::adjacent_find(drawn) == drawn.end()) << "of " << drawn.size();
}

TEST(VerifyTest, TensorsThatOverlapAreLeftAsTheFunctionLeavesThem) {
  const at::NoGradGuard no_grad;
  at::Tensor state = at::zeros({2, 3});
  auto of_captured = script([&](const at::Tensor& x) {
    at::Tensor row = state[0];
    row.add_(x);
    return state * 2;
  });
  auto of_inputs = script([](const at::Tensor& a, const at::Tensor& b) {
    at::Tensor(a).add_(1);
    return a + b;
  });
  for (int call = 0; call < 9; ++call) {
    const at::Tensor x = at::full({3}, call), all = at::arange(6, at::kFloat);
    EXPECT_EQ(of_captured(x)[0][0].item<float>(), call * (call + 1));
    of_inputs(all.slice(0, 0, 4), all.slice(0, 2, 6));
    EXPECT_EQ(all[3].item<float>(), 4);
  }
  EXPECT_TRUE(contains(of_captured.explain(), "program: ")) << of_captured.explain();
  EXPECT_TRUE(contains(of_inputs.explain(), "program: ")) << of_inputs.explain();
}

}  // namespace
}  // namespace cohort::script

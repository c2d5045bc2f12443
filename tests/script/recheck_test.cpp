#include "cohort/script/recheck.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "cohort/optim/sgd.h"
#include "cohort/script/script.h"
#include "cohort/script/step.h"
#include "nets.h"
#include "tests/support/contains.h"

namespace cohort::script {
namespace {

using test::contains;
using test::same_bits;

// What no operator shows is found by a recheck that compares results and effects.
TEST(RecheckTest, FindsReadsAndWritesThroughPointersAndSeedsSetInCpp) {
  const at::NoGradGuard no_grad;
  const auto option = ScriptOptions().recheck_every(3).min_operators(0);
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
                       "a recheck found that result 0 has other values"));
  EXPECT_TRUE(contains(ends([](const Tensors& in) { return Tensors{in[0] * in[0].data_ptr<float>()[0]}; }),
                       "a recheck found"));
  EXPECT_TRUE(contains(ends([](const Tensors& in) {
                         return in[0].accessor<float, 1>()[0] > 2 ? Tensors{in[0] * 2} : Tensors{in[0] * 3};
                       }),
                       "a recheck found"));
  EXPECT_TRUE(contains(ends([](const Tensors& in) {
                         at::manual_seed(3);
                         return Tensors{at::rand_like(in[0])};
                       }),
                       "a recheck found that result 0"));
  at::Tensor state = at::zeros({4});
  EXPECT_TRUE(contains(ends([&](const Tensors& in) {
                         at::Tensor y = in[0] * 2;
                         y.data_ptr<float>()[0] = 7;
                         state.copy_(y);
                         return Tensors{in[0] + 1};
                       }),
                       "a recheck found that a tensor Float [4] is left with other values"));
}

TEST(RecheckTest, ReplaysAreVerifiedAtCallThreeAndAtEachPowerOfTwo) {
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
TEST(RecheckTest, ADifferenceMakesOneShapeEagerAndReturnsTheFunctionsResult) {
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
  EXPECT_TRUE(contains(text, "Float [4]; without gradients\n    eager: a recheck found that result 0"))
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

TEST(RecheckTest, FindsGradientsThatAreOthers) {
  auto fast = script([](const at::Tensor& x) { return SecretlyDoubled::apply(x * 3); },
                     ScriptOptions().recheck_every(3));
  at::Tensor x = at::ones({4}).requires_grad_();
  for (int i = 0; i < 8; ++i) {
    x.mutable_grad().reset();
    fast(x).sum().backward();
  }
  EXPECT_TRUE(contains(fast.explain(), "a recheck found that gradient 0 has other values")) << fast.explain();
  EXPECT_TRUE(same_bits(x.grad(), at::full({4}, 6.0)));
}

TEST(RecheckTest, OfASoundProgramLeavesNoTrace) {
  const auto trained = [](std::int64_t recheck_every) {
    at::manual_seed(1);
    auto model = test::small_mlp();
    optim::SGD sgd(model->parameters(), optim::SGDOptions(0.05).momentum(0.9));
    auto step = script_step(model, test::cross_entropy, sgd, ScriptOptions().recheck_every(recheck_every));
    auto fast = script(model, ScriptOptions().recheck_every(recheck_every));
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

}  // namespace
}  // namespace cohort::script

// Replays of forked parts that share views, and that follow each other.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "cohort/script/fork.h"
#include "cohort/script/script.h"
#include "tests/script/same_bits.h"

namespace cohort::script {
namespace {

using test::same_bits;

// Layers on three dimensions work on a view of their input, of which the frame has one.
TEST(ParallelRegionsTest, PartsThatTakeTheSameViewOfAnInput) {
  const at::NoGradGuard no_grad;
  torch::nn::Linear a(16, 16), b(16, 16);
  for (const bool verify : {true, false}) {
    auto fast = script(
        [&](const at::Tensor& x) {
          auto left = fork([a](const at::Tensor& t) mutable { return a->forward(t).sin(); }, x);
          auto right = fork([b](const at::Tensor& t) mutable { return b->forward(t).cos(); }, x);
          const at::Tensor of_caller = x.transpose(1, 2).exp();
          return wait(left) + wait(right) + of_caller.transpose(1, 2);
        },
        ScriptOptions().verify(verify));
    for (int i = 0; i < 400; ++i) {
      const at::Tensor x = at::randn({2, 16, 16});
      const at::Tensor want =
          a->forward(x).sin() + b->forward(x).cos() + x.transpose(1, 2).exp().transpose(1, 2);
      ASSERT_TRUE(same_bits(fast(x), want)) << i;
    }
  }
}

TEST(ParallelRegionsTest, APartThatReturnsAViewOfItsInput) {
  const at::NoGradGuard no_grad;
  const auto part = [](const at::Tensor& x) {
    at::Tensor y = x * 2;
    for (int i = 0; i < 30; ++i) y = y.sin();
    return std::vector<at::Tensor>{y, x.t()};
  };
  auto fast = script(
      [&](const at::Tensor& x) {
        auto future = fork(part, x);
        const at::Tensor of_caller = x + 1;
        const auto found = wait(future);
        return found[1] * 3 + of_caller - found[0];
      },
      ScriptOptions().verify(false));
  for (int i = 0; i < 400; ++i) {
    const at::Tensor x = at::randn({4, 4});
    ASSERT_TRUE(same_bits(fast(x), part(x)[1] * 3 + (x + 1) - part(x)[0])) << i;
  }
}

TEST(ParallelRegionsTest, APartAfterAnotherOfWhichItTakesTheResult) {
  const at::NoGradGuard no_grad;
  const auto first = [](const at::Tensor& x) { return (x + 1).exp() * 0.1; };
  const auto second = [](const at::Tensor& x) { return (x - 1).tanh() * 2; };
  auto fast = script([&](const at::Tensor& x) {
    const at::Tensor h = x * 2;
    auto part = fork(first, h);
    const at::Tensor of_caller = h * 3;
    auto next_part = fork(second, wait(part));
    return wait(next_part) + of_caller;
  });
  for (int i = 0; i < 50; ++i) {
    const at::Tensor x = at::randn({4, 4});
    ASSERT_TRUE(same_bits(fast(x), second(first(x * 2)) + x * 2 * 3)) << i;
  }
}

}  // namespace
}  // namespace cohort::script

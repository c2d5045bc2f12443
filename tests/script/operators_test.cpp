#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "cohort/base/error.h"
#include "cohort/ops/nms.h"
#include "cohort/ops/operator.h"
#include "cohort/ops/swiglu.h"
#include "cohort/optim/autocast.h"
#include "cohort/script/script.h"
#include "same_bits.h"
#include "tests/support/contains.h"
#include "tests/support/throws.h"

// Operators of one's own in script mode.
namespace cohort::script {
namespace {

using test::contains;
using test::same_bits;

at::Tensor cube(const at::Tensor& x) {
  return x * x * x;
}

void count_(at::Tensor& state, const at::Tensor& x) {
  state.add_(x.sum());
}

at::Tensor positive(const at::Tensor& x) {
  return x.masked_select(x > 0);
}

TORCH_LIBRARY(script_test, library) {
  ops::define(library, "cube(Tensor x) -> Tensor")
      .composite(&cube)
      .autocast(ops::Autocast::kNarrow)
      .backward([](const ops::Call& call, const Tensors& gradients) {
        return Tensors{gradients[0] * call.tensor(0) * call.tensor(0) * 3};
      });
  ops::define(library, "count_(Tensor(a!) state, Tensor x) -> ()").composite(&count_);
  ops::define(library, "positive(Tensor x) -> Tensor", {at::Tag::dynamic_output_shape}).composite(&positive);
  ops::define(library, "positive_untagged(Tensor x) -> Tensor").composite(&positive);
}

at::Tensor call(const char* name, const at::Tensor& x) {
  return ops::find<at::Tensor(const at::Tensor&)>(name).call(x);
}

template <typename Fn>
void expect_same_with_gradients(const Fn& fn) {
  auto fast = script(fn);
  for (int i = 0; i < 6; ++i) {
    const at::Tensor x = at::randn({4, 8}).requires_grad_();
    const at::Tensor expected = fn(x), found = fast(x);
    EXPECT_TRUE(same_bits(expected, found)) << fast.explain();
    const at::Tensor grad_output = at::randn_like(expected);
    EXPECT_TRUE(same_bits(torch::autograd::grad({expected}, {x}, {grad_output}),
                          torch::autograd::grad({found}, {x}, {grad_output})))
        << fast.explain();
  }
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

TEST(ScriptOperatorsTest, WithDerivativesReplayForwardAndBackward) {
  const at::Tensor w = at::randn({8, 16});
  expect_same_with_gradients([](const at::Tensor& x) { return call("script_test::cube", x.sin()).exp(); });
  expect_same_with_gradients([=](const at::Tensor& x) {
    const auto parts = at::mm(x, w).chunk(2, 1);
    return ops::swiglu(parts[0], parts[1]) + 1;
  });
}

TEST(ScriptOperatorsTest, FollowTheirAutocastRule) {
  const auto fn = [](const at::Tensor& x) {
    const at::Tensor y = call("script_test::cube", x);
    EXPECT_EQ(y.scalar_type(), at::autocast::is_autocast_enabled(at::kCPU) ? at::kBFloat16 : at::kFloat);
    return y.to(at::kFloat).exp();
  };
  expect_same_with_gradients(fn);
  const optim::Autocast narrow(at::kCPU, at::kBFloat16);
  expect_same_with_gradients(fn);
}

TEST(ScriptOperatorsTest, ThatWriteToTheirArgumentsDoSoInEachRun) {
  const at::NoGradGuard no_grad;
  at::Tensor state = at::zeros({});
  const auto count = ops::find<void(at::Tensor&, const at::Tensor&)>("script_test::count_");
  auto fast = script([&](const at::Tensor& x) {
    count.call(state, x);
    return state * 2;
  });
  for (int i = 1; i <= 6; ++i) EXPECT_EQ(fast(at::ones({3})).item<float>(), 6 * i);
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

TEST(ScriptOperatorsTest, WhoseSizesDependOnValuesStayEagerOrAreFoundOut) {
  const at::NoGradGuard no_grad;
  const at::Tensor two_positive = at::tensor({1.0F, -1.0F, 2.0F}),
                   one_positive = at::tensor({1.0F, -1.0F, -2.0F});
  auto tagged = script([](const at::Tensor& x) { return call("script_test::positive", x).sum(); });
  for (int i = 0; i < 4; ++i)
    EXPECT_EQ(tagged(i < 3 ? two_positive : one_positive).item<float>(), i < 3 ? 3 : 1);
  EXPECT_TRUE(contains(tagged.explain(), "script_test::positive returns a tensor whose size depends"))
      << tagged.explain();

  auto boxes = script([](const at::Tensor& b) { return ops::nms(b, b.select(1, 0), 0.5); });
  const at::Tensor disjoint = at::tensor({0.F, 0.F, 1.F, 1.F, 5.F, 5.F, 6.F, 6.F}).view({2, 4});
  const at::Tensor overlapping = at::tensor({0.F, 0.F, 1.F, 1.F, 0.F, 0.F, 1.F, 1.F}).view({2, 4});
  for (int i = 0; i < 6; ++i) EXPECT_EQ(boxes(i < 3 ? disjoint : overlapping).numel(), i < 3 ? 2 : 1);
  EXPECT_TRUE(contains(boxes.explain(), "cohort::nms returns a tensor whose size depends"))
      << boxes.explain();

  auto untagged = script([](const at::Tensor& x) { return call("script_test::positive_untagged", x).sum(); },
                         ScriptOptions().verify(false));  // which may be due at any call
  for (int i = 0; i < 4; ++i) EXPECT_EQ(untagged(two_positive.clone()).item<float>(), 3);
  COHORT_EXPECT_THROW_WITH(untagged(one_positive), UsageError, "script_test::positive_untagged");
  EXPECT_EQ(untagged(two_positive).item<float>(), 3);
}

}  // namespace
}  // namespace cohort::script

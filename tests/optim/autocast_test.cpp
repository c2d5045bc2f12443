#include "cohort/optim/autocast.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>

#include <stdexcept>
#include <thread>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::optim {
namespace {

at::ScalarType product_dtype(const at::Tensor& a) {
  return at::mm(a, a).scalar_type();
}

TEST(AutocastTest, RunsProductsInBf16AndNestsAndRestores) {
  const at::Tensor a = at::ones({2, 2});
  const at::ScalarType before = at::autocast::get_autocast_dtype(at::kCPU);
  {
    Autocast outer(at::kCPU, at::kBFloat16);
    EXPECT_EQ(product_dtype(a), at::kBFloat16);
    {
      Autocast off(at::kCPU, at::kBFloat16, false);
      EXPECT_EQ(product_dtype(a), at::kFloat);
    }
    {
      Autocast half(at::kCPU, at::kHalf);
      EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kHalf);
    }
    EXPECT_EQ(product_dtype(a), at::kBFloat16);
  }
  EXPECT_EQ(product_dtype(a), at::kFloat);
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), before);
}

TEST(AutocastTest, AnExceptionLeavesNothingBehind) {
  try {
    Autocast autocast(at::kCPU, at::kBFloat16);
    throw std::runtime_error("in forward");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_EQ(at::autocast::increment_nesting(), 1);
  EXPECT_EQ(at::autocast::decrement_nesting(), 0);
}

TEST(AutocastTest, TheOutermostGuardDropsCachedCastsOfParameters) {
  at::Tensor weight = at::ones({2, 2}).set_requires_grad(true);
  const at::Tensor input = at::ones({2, 2});
  auto forward = [&] { return at::mm(input, weight)[0][0].item<float>(); };
  {
    Autocast outer(at::kCPU, at::kBFloat16);
    {
      Autocast inner(at::kCPU, at::kBFloat16);
      EXPECT_EQ(forward(), 2.0f);
    }
    {
      at::NoGradGuard no_grad;
      weight.fill_(3.0);
    }
    EXPECT_EQ(forward(), 2.0f) << "the cast made inside is still used";
  }
  Autocast next(at::kCPU, at::kBFloat16);
  EXPECT_EQ(forward(), 6.0f);
}

// The cast of the second factor, which needs a gradient.
const torch::autograd::Node* cast_of(const at::Tensor& product) {
  return product.grad_fn()->next_edge(1).function.get();
}

TEST(AutocastTest, AScopeThatCastsNothingLeavesTheCacheToTheScopesInIt) {
  at::Tensor weight = at::ones({2, 2}).set_requires_grad(true);
  const at::Tensor input = at::ones({2, 2});
  for (const float value : {1.0f, 3.0f}) {
    {
      at::NoGradGuard no_grad;
      weight.fill_(value);
    }
    const Autocast off(at::kCPU, at::kBFloat16, false);
    const Autocast on(at::kCPU, at::kBFloat16);
    const at::Tensor first = at::mm(input, weight), second = at::mm(input, weight);
    EXPECT_EQ(first[0][0].item<float>(), 2 * value);
    EXPECT_EQ(cast_of(first), cast_of(second));
  }
}

TEST(AutocastTest, WithoutCacheAParameterIsCastAtEachUse) {
  const at::Tensor weight = at::ones({2, 2}).set_requires_grad(true), input = at::ones({2, 2});
  {
    const Autocast outer(at::kCPU, at::kBFloat16, true, false);
    const at::Tensor first = at::mm(input, weight), second = at::mm(input, weight);
    EXPECT_NE(cast_of(first), cast_of(second));
    const Autocast inner(at::kCPU, at::kBFloat16);
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  }
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
}

TEST(AutocastTest, AScopeOfAnotherThreadLeavesCastsInUse) {
  const at::Tensor weight = at::ones({2, 2}).set_requires_grad(true), input = at::ones({2, 2});
  const Autocast autocast(at::kCPU, at::kBFloat16);
  const at::Tensor first = at::mm(input, weight);
  std::thread([&] {
    const Autocast elsewhere(at::kCPU, at::kBFloat16);
    EXPECT_EQ(product_dtype(input), at::kBFloat16);
  }).join();
  const at::Tensor second = at::mm(input, weight);
  EXPECT_EQ(cast_of(first), cast_of(second));
}

TEST(AutocastTest, AThreadSeesItsStepsWhileAnotherThreadsScopeLasts) {
  at::Tensor weight = at::ones({2, 2}).set_requires_grad(true);
  const at::Tensor input = at::ones({2, 2});
  const Autocast autocast(at::kCPU, at::kBFloat16);
  EXPECT_EQ(at::mm(input, weight)[0][0].item<float>(), 2.0f);
  std::thread([&] {
    for (const float value : {3.0f, 4.0f}) {
      {
        at::NoGradGuard no_grad;
        weight.fill_(value);
      }
      const Autocast elsewhere(at::kCPU, at::kBFloat16);
      const at::Tensor first = at::mm(input, weight), second = at::mm(input, weight);
      EXPECT_EQ(first[0][0].item<float>(), 2 * value);
      EXPECT_NE(cast_of(first), cast_of(second)) << "this thread has no cache";
    }
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  }).join();
}

TEST(AutocastTest, RejectsOtherDtypes) {
  COHORT_EXPECT_THROW_WITH(Autocast(at::kCPU, at::kFloat), UsageError,
                           "got dtype Float, expected BFloat16 or Half");
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

}  // namespace
}  // namespace cohort::optim

#include "cohort/optim/clip.h"

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>

#include "cohort/base/error.h"
#include "tests/optim/support.h"
#include "tests/support/throws.h"

namespace cohort::optim {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors with_gradients() {
  Tensors parameters = test::fresh_parameters();
  test::set_gradients(parameters, 1);
  return parameters;
}

TEST(ClipTest, EqualsPythonsClipGradNorm) {
  const std::vector<std::pair<std::string, double>> cases = {
      {"clip_2", 2.0}, {"clip_inf", test::kInfinity}, {"clip_1", 1.0}};
  for (const auto& [name, norm_type] : cases) {
    Tensors parameters = with_gradients();
    const double norm = clip_grad_norm_(parameters, 0.5, norm_type);
    const Tensors golden = test::golden_tensors(name);
    EXPECT_NEAR(norm, golden[3].item<double>(), 1e-5 * norm) << name;
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const at::Tensor gradient = parameters[p].grad().flatten().to(at::kDouble);
      EXPECT_LE((gradient - golden[p]).abs().max().item<double>(), 1e-7) << name;
    }
    EXPECT_NEAR(grad_norm(parameters, norm_type), 0.5, 1e-5) << name;
  }
}

TEST(ClipTest, SmallGradientsAreLeftAlone) {
  Tensors parameters = with_gradients();
  const double norm = clip_grad_norm_(std::vector<ParamGroup>{{.params = parameters}}, 1e6);
  EXPECT_GT(norm, 1.0);
  EXPECT_TRUE(test::same_bits(parameters[0].grad(), test::value(0, 1)));
  EXPECT_EQ(clip_grad_norm_(test::fresh_parameters(), 1.0), 0.0);
  EXPECT_EQ(grad_norm(test::fresh_parameters()), 0.0);
}

TEST(ClipTest, DtypesMayBeMixed) {
  Tensors parameters = {at::zeros({2}).set_requires_grad(true),
                        at::zeros({2}, at::kDouble).set_requires_grad(true)};
  parameters[0].mutable_grad() = at::full({2}, 3.0);
  parameters[1].mutable_grad() = at::full({2}, 4.0, at::kDouble);
  EXPECT_NEAR(clip_grad_norm_(parameters, 1.0), std::sqrt(50.0), 1e-6);
  EXPECT_NEAR(parameters[0].grad()[0].item<double>(), 3 / std::sqrt(50.0), 1e-6);
  EXPECT_NEAR(parameters[1].grad()[0].item<double>(), 4 / std::sqrt(50.0), 1e-6);
}

TEST(ClipTest, NormsThatAreNotFiniteAreRejectedWhenAsked) {
  Tensors parameters = with_gradients();
  parameters[0].mutable_grad().view(-1)[0] = test::kInfinity;
  COHORT_EXPECT_THROW_WITH(clip_grad_norm_(parameters, 1.0, 2.0, true), UsageError,
                           "the norm of the gradients is inf");
  EXPECT_TRUE(test::same_bits(parameters[1].grad(), test::value(1, 1)));
  EXPECT_EQ(clip_grad_norm_(parameters, 1.0), test::kInfinity);
  EXPECT_TRUE(std::isnan(parameters[0].grad().view(-1)[0].item<float>()));
  EXPECT_TRUE(at::equal(parameters[1].grad(), at::zeros_like(parameters[1])));
}

TEST(ClipTest, LazilyNegativeGradientsAreClipped) {
  for (const double size : {1.0, 1e30}) {  // the norm of the second is beyond float
    Tensors plain = with_gradients(), lazy = with_gradients();
    for (Tensors* parameters : {&plain, &lazy}) {
      for (at::Tensor& parameter : *parameters) parameter.mutable_grad().mul_(size);
    }
    lazy[0].mutable_grad() = lazy[0].grad().neg()._neg_view();
    ASSERT_FALSE(clip_grad_norm_unless_non_finite_({{.params = plain}}, 0.5).any());
    ASSERT_FALSE(clip_grad_norm_unless_non_finite_({{.params = lazy}}, 0.5).any());
    for (std::size_t p = 0; p < plain.size(); ++p) {
      EXPECT_TRUE(at::allclose(plain[p].grad(), lazy[p].grad(), 1e-6, 1e-9)) << p;
    }
  }
}

TEST(ClipTest, ByValueLimitsEveryElement) {
  Tensors parameters = with_gradients();
  clip_grad_value_(parameters, 0.5);
  EXPECT_TRUE(at::equal(parameters[2].grad(), test::value(2, 1).clamp(-0.5, 0.5)));
  EXPECT_EQ(parameters[2].grad().abs().max().item<float>(), 0.5f);
}

TEST(ClipTest, RejectsWhatCannotWork) {
  Tensors parameters = with_gradients();
  COHORT_EXPECT_THROW_WITH(clip_grad_norm_(parameters, -1.0), UsageError,
                           "max_norm is -1, expected 0 or more");
  COHORT_EXPECT_THROW_WITH(clip_grad_value_(parameters, -1.0), UsageError,
                           "clip_value is -1, expected 0 or more");
  at::Tensor sparse = at::ones({2}).set_requires_grad(true);
  sparse.mutable_grad() = at::ones({2}).to_sparse();
  COHORT_EXPECT_THROW_WITH(clip_grad_norm_(Tensors{sparse}, 1.0), UsageError, "a gradient is sparse");
}

}  // namespace
}  // namespace cohort::optim

#include "cohort/ops/swiglu.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cohort/base/error.h"
#include "cohort/ops/check.h"
#include "cohort/optim/autocast.h"
#include "tests/support/throws.h"

namespace cohort::ops {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor composite(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate) * up;
}

/// The most that two results differ by, relative to the larger of 1 and their size.
double distance(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  return ((x - y).abs() / at::clamp_min(y.abs(), 1)).max().item<double>();
}

struct SwigluTest : ::testing::Test {
  SwigluTest() { at::manual_seed(3); }
  at::Tensor numbers(at::IntArrayRef sizes, at::ScalarType dtype) {
    return at::randn(sizes).mul_(3).to(dtype);
  }
};

TEST_F(SwigluTest, EqualsTheCompositeForwardAndBackward) {
  struct Case {
    at::ScalarType dtype;
    double tolerance;
  };
  for (const Case& c : {Case{at::kFloat, 2e-6}, Case{at::kDouble, 1e-14}, Case{at::kBFloat16, 2e-2}}) {
    // 1 and 37: ends of loops that vectors do not fill; 70,000: several stretches.
    for (const std::int64_t columns : {1, 37, 70000}) {
      Tensors ours{numbers({2, columns}, c.dtype), numbers({2, columns}, c.dtype)}, theirs;
      for (at::Tensor& tensor : ours) {
        theirs.push_back(tensor.clone().requires_grad_());
        tensor.requires_grad_();
      }
      const at::Tensor a = swiglu(ours[0], ours[1]), b = composite(theirs[0], theirs[1]);
      ASSERT_LE(distance(a, b), c.tolerance) << c.dtype << " " << columns;
      const at::Tensor gradient = numbers({2, columns}, c.dtype);
      a.backward(gradient);
      b.backward(gradient);
      for (const int i : {0, 1}) {
        ASSERT_LE(distance(ours[i].grad(), theirs[i].grad()), 2 * c.tolerance)
            << c.dtype << " " << columns << " " << i;
      }
    }
  }
}

TEST_F(SwigluTest, LargeNumbersAndNoNumbers) {
  const at::Tensor gate = at::tensor({-200.0F, -80.0F, 0.0F, 80.0F, 200.0F, std::nanf("")});
  const at::Tensor out = swiglu(gate, at::ones({6}));
  EXPECT_NEAR(out[0].item<float>(), 0, 1e-30);
  EXPECT_NEAR(out[1].item<float>(), 0, 1e-30);
  EXPECT_EQ(out[2].item<float>(), 0);
  EXPECT_EQ(out[3].item<float>(), 80);
  EXPECT_EQ(out[4].item<float>(), 200);
  EXPECT_TRUE(std::isnan(out[5].item<float>()));
}

// Relative to the value itself, where the sigmoid alone has no room in a float, too.
TEST_F(SwigluTest, IsRightToTheLastDigitsOfAnySize) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const bool is_float = dtype == at::kFloat;
    const double least = is_float ? 1.2e-38 : 2.3e-308, most = is_float ? 3e38 : 1e308;
    const double limit = is_float ? 2e-6 : 1e-12, end = is_float ? 174 : 744;
    const at::Tensor line = at::linspace(-end, is_float ? 90 : 720, 20001, dtype);
    for (const double size : {1.0, -1e-3, 1e20, 3e38}) {
      const at::Tensor gate = line.clone().requires_grad_(), up = at::full_like(line, size).requires_grad_();
      const at::Tensor flowing = at::full_like(line, 0.5);
      const at::Tensor out = swiglu(gate, up);
      out.backward(flowing);
      const auto* x = line.const_data_ptr();
      std::int64_t compared = 0;
      const auto compare = [&](const at::Tensor& got, std::int64_t i, long double expected) {
        if (std::fabs(expected) < least || std::fabs(expected) > most) return;
        ++compared;
        const long double value = got[i].item<double>();
        ASSERT_LE(std::fabs(value - expected) / std::fabs(expected), limit)
            << dtype << " at " << line[i] << size;
      };
      for (std::int64_t i = 0; i < line.numel(); i += 7) {
        const long double g = is_float ? static_cast<const float*>(x)[i] : static_cast<const double*>(x)[i];
        const long double u = up[i].item<double>();
        const long double sigmoid = 1 / (1 + std::exp(-g)), silu = g * sigmoid;
        compare(out, i, silu * u);
        compare(up.grad(), i, silu / 2);
        const long double slope = 1 + g * (1 - sigmoid);
        if (std::fabs(slope) > 0.1L) compare(gate.grad(), i, u / 2 * sigmoid * slope);  // it has a zero
      }
      EXPECT_GT(compared, 3000);
    }
  }
}

TEST_F(SwigluTest, WhatIsNoNumberStaysNone) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const at::Tensor gate = at::full({40}, NAN).to(dtype).requires_grad_(), up = at::ones({40}, dtype);
    const at::Tensor out = swiglu(gate, up);
    out.sum().backward();
    EXPECT_TRUE(at::isnan(out).all().item<bool>()) << dtype;
    EXPECT_TRUE(at::isnan(gate.grad()).all().item<bool>()) << dtype;
  }
}

TEST_F(SwigluTest, ItsPartsAgree) {
  for (const at::Tensor& sample : {at::randn({2, 3}, at::kDouble), at::randn({3, 2}, at::kDouble).t()}) {
    const at::Tensor gate = sample.clone().requires_grad_(), up = (sample + 1).detach().requires_grad_();
    opcheck("cohort::swiglu", {gate, up});
    opcheck("cohort::swiglu_backward", {up, gate, up});
    gradgradcheck([](const Tensors& in) { return Tensors{swiglu(in[0], in[1])}; }, {gate, up});
  }
  opcheck("cohort::swiglu", {at::randn({4, 5}), at::randn({4, 5})});
  opcheck("cohort::swiglu", {at::randn({4, 5}).to(at::kBFloat16), at::randn({4, 5}).to(at::kBFloat16)});
}

TEST_F(SwigluTest, EmptyTensorsAreFine) {
  EXPECT_EQ(swiglu(at::empty({0, 3}), at::empty({0, 3})).sizes(), at::IntArrayRef({0, 3}));
}

TEST_F(SwigluTest, HalvesOfOneTensorWork) {
  const at::Tensor both = at::randn({5, 8});
  EXPECT_LE(distance(swiglu(both.narrow(1, 0, 4), both.narrow(1, 4, 4)),
                     composite(both.narrow(1, 0, 4), both.narrow(1, 4, 4))),
            2e-6);
}

TEST_F(SwigluTest, UnderAutocastTheWidestCounts) {
  const at::Tensor wide = at::randn({3}), narrow = wide.to(at::kBFloat16);
  const optim::Autocast autocast(at::kCPU, at::kBFloat16);
  EXPECT_EQ(swiglu(wide, narrow).scalar_type(), at::kFloat);
  EXPECT_EQ(swiglu(narrow, narrow).scalar_type(), at::kBFloat16);
}

TEST_F(SwigluTest, WhatDoesNotFitIsRejected) {
  COHORT_EXPECT_THROW_WITH(swiglu(at::ones({2}), at::ones({3})), UsageError,
                           "[ops.swiglu] gate is Float [2], up Float [3]");
  COHORT_EXPECT_THROW_WITH(swiglu(at::ones({2}), at::ones({2}, at::kDouble)), UsageError, "up Double [2]");
  COHORT_EXPECT_THROW_WITH(swiglu(at::ones({2}, at::kInt), at::ones({2}, at::kInt)), UsageError,
                           "got Int, expected");
}

}  // namespace
}  // namespace cohort::ops

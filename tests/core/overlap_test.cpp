#include "cohort/core/overlap.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <random>

namespace cohort::core {
namespace {

// By writing to one and reading the other.
bool do_overlap(const at::Tensor& whole, const at::Tensor& a, const at::Tensor& b) {
  whole.zero_();
  a.fill_(1);
  return b.numel() > 0 && b.any().item<bool>();
}

TEST(OverlapTest, PartsOfOneTensorAreToldApartExactly) {
  std::mt19937 random(1);
  const auto below = [&](std::int64_t n) {
    return std::uniform_int_distribution<std::int64_t>(0, n - 1)(random);
  };
  const at::Tensor whole = at::zeros({4, 6, 5});
  int apart = 0, together = 0;
  for (int i = 0; i < 4'000; ++i) {
    const std::int64_t steps[] = {1 + below(3), 1 + below(3), 1 + below(3)};
    const auto part = [&] {
      at::Tensor view = whole;
      for (std::int64_t dim = 0; dim < 3; ++dim) {
        const std::int64_t begin = below(view.size(dim)), end = begin + 1 + below(view.size(dim) - begin);
        view = view.slice(dim, begin, end, steps[dim]);
      }
      return view.transpose(0, 2);
    };
    const at::Tensor a = part(), b = part();
    const bool expected = do_overlap(whole, a, b);
    ASSERT_EQ(may_overlap(a, b), expected) << a.sizes() << b.sizes() << a.strides() << b.strides();
    ASSERT_EQ(may_overlap(b, a), expected);
    ++(expected ? together : apart);
  }
  EXPECT_GT(apart, 100);
  EXPECT_GT(together, 100);
}

TEST(OverlapTest, WhatCannotBeToldMayOverlap) {
  const at::Tensor whole = at::zeros({4, 6});
  EXPECT_TRUE(may_overlap(whole.select(1, 0), whole.slice(1, 1, 2))) << "numbers of dimensions";
  EXPECT_TRUE(may_overlap(whole.slice(1, 0, 6, 2), whole.slice(1, 1, 6, 3))) << "strides";
  EXPECT_TRUE(may_overlap(whole.narrow(1, 0, 1).expand({4, 6}), whole.narrow(1, 1, 2)));
  EXPECT_FALSE(may_overlap(whole.select(0, 0), whole.narrow(0, 1, 2))) << "ranges that do not meet";
  EXPECT_FALSE(may_overlap(whole, at::zeros({4, 6})));
  EXPECT_FALSE(may_overlap(whole, whole.narrow(0, 2, 0)));
  EXPECT_TRUE(may_overlap(whole, whole));
}

TEST(OverlapTest, ElementsOfOneTensor) {
  const at::Tensor whole = at::zeros({4, 6});
  EXPECT_FALSE(may_overlap(whole.t()));
  EXPECT_FALSE(may_overlap(whole.slice(1, 0, 6, 2)));
  EXPECT_TRUE(may_overlap(whole.narrow(1, 0, 1).expand({4, 6})));
  EXPECT_TRUE(may_overlap(whole.as_strided({4, 3}, {2, 1})));
}

}  // namespace
}  // namespace cohort::core

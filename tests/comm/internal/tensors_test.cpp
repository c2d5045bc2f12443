// What all backends of our own ask of tensors; that they ask it, and name themselves, is tested with each.
#include "cohort/comm/internal/tensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

constexpr CallSite kWho{"ours", "gather"};

TEST(TensorsTest, WhatMemoryCannotBeIsRejectedNamingBackendAndCall) {
  COHORT_EXPECT_THROW_WITH(check_tensor(kWho, at::ones({2}, at::kMeta)), c10::Error,
                           "Backend ours: gather: got a tensor on meta, expected one on the CPU");
  COHORT_EXPECT_THROW_WITH(check_tensor(kWho, at::ones({2, 2}).to_sparse()), c10::Error,
                           "got a sparse tensor, expected a dense one");
  COHORT_EXPECT_THROW_WITH(check_tensors(kWho, {at::ones({2}), at::ones({4, 4}).t()}), c10::Error,
                           "Backend ours: gather: got a tensor of strides [1, 4], expected a contiguous one");
  COHORT_EXPECT_THROW_WITH(check_any(kWho, {}), c10::Error, "got no tensors, expected one at least");
  COHORT_EXPECT_THROW_WITH(check_any(kWho, {at::ones({4, 4}).t()}), c10::Error, "expected a contiguous one");
  COHORT_EXPECT_THROW_WITH(check_one(kWho, {}), c10::Error, "got 0 tensors, expected one");
  COHORT_EXPECT_THROW_WITH(check_one(kWho, {at::ones({4, 4}).t()}), c10::Error, "expected a contiguous one");
  const Tensors single{at::ones({3, 1})};
  EXPECT_TRUE(check_one(kWho, single).is_same(single[0]));
}

TEST(TensorsTest, TensorsThatDoNotGoTogetherAreRejected) {
  const at::Tensor six = at::ones({2, 3}), two = at::ones({2}), ints = at::ones({6}, at::kInt);
  check_alike(kWho, six, at::ones({6}));
  check_alike(kWho, six, two, 3);
  COHORT_EXPECT_THROW_WITH(
      check_alike(kWho, six, two, 2), c10::Error,
      "Backend ours: gather: got Float[2, 3] beside Float[2], expected one type and 2 times as many numbers");
  COHORT_EXPECT_THROW_WITH(check_alike(kWho, six, ints), c10::Error, "got Float[2, 3] beside Int[6]");
  COHORT_EXPECT_THROW_WITH(check_alike(kWho, six, six.t()), c10::Error, "expected a contiguous one");
  COHORT_EXPECT_THROW_WITH(check_same_type(kWho, six, ints), c10::Error,
                           "got Int to exchange for Float, expected one type");
  check_as_many(kWho, 2, 2);
  COHORT_EXPECT_THROW_WITH(check_as_many(kWho, 3, 2), c10::Error, "got 3 outputs and 2 inputs");
  COHORT_EXPECT_THROW_WITH(check_as_many(kWho, 0, 0), c10::Error, "got 0 outputs and 0 inputs");
  COHORT_EXPECT_THROW_WITH(check_one_each(kWho, {six}, 2), c10::Error,
                           "got 1 tensors, expected one for each of 2 ranks");
  check_list(kWho, {{two, two, two}}, two, 3);
  COHORT_EXPECT_THROW_WITH(check_list(kWho, {{two}, {two}}, two, 1), c10::Error, "got 2 lists of tensors");
  COHORT_EXPECT_THROW_WITH(check_list(kWho, {{two, two}}, two, 3), c10::Error, "one for each of 3 ranks");
  COHORT_EXPECT_THROW_WITH(check_list(kWho, {{two, six}}, two, 2), c10::Error,
                           "got Float[2, 3] beside Float[2]");
  EXPECT_EQ(check_rank(kWho, 2, 3), 2);
  COHORT_EXPECT_THROW_WITH(check_rank(kWho, 3, 3), c10::Error, "got rank 3, expected 0 to 2");
  COHORT_EXPECT_THROW_WITH(check_rank(kWho, -1, 3), c10::Error, "got rank -1, expected 0 to 2");
}

TEST(TensorsTest, WhatThereIsNoCodeForIsRejectedByOperationAndType) {
  const auto of = [](at::ScalarType dtype, c10d::ReduceOp op) {
    return reduction_type_of(kWho, at::empty({5}, dtype), op);
  };
  COHORT_EXPECT_THROW_WITH(of(at::kFloat, c10d::ReduceOp::BAND), c10::Error,
                           "Backend ours: gather does not support BAND of Float");
  COHORT_EXPECT_THROW_WITH(of(at::kComplexFloat, c10d::ReduceOp::MAX), c10::Error, "MAX of ComplexFloat");
  COHORT_EXPECT_THROW_WITH(of(at::kComplexHalf, c10d::ReduceOp::PRODUCT), c10::Error,
                           "PRODUCT of ComplexHalf");
  COHORT_EXPECT_THROW_WITH(of(at::kBool, c10d::ReduceOp::AVG), c10::Error, "AVG of Bool");
  COHORT_EXPECT_THROW_WITH(of(at::kFloat8_e4m3fn, c10d::ReduceOp::SUM), c10::Error, "SUM of Float8_e4m3fn");
  COHORT_EXPECT_THROW_WITH(of(at::kFloat, c10d::ReduceOp::UNUSED), c10::Error,
                           "does not support reduce operation");
  const ReductionType sum = of(at::kComplexDouble, c10d::ReduceOp::SUM);
  EXPECT_TRUE(sum.dtype == Dtype::kDouble && sum.op == Op::kSum);
  EXPECT_EQ(sum.numel(at::empty({5})), 10U);
  const ReductionType product = of(at::kComplexDouble, c10d::ReduceOp::PRODUCT);
  EXPECT_TRUE(product.dtype == Dtype::kComplexDouble && product.op == Op::kProduct);
  EXPECT_EQ(product.numel(at::empty({5})), 5U);
}

TEST(TensorsTest, AFactorScalesInPlaceOrACopy) {
  const c10d::ReduceOp twice = c10d::makePreMulSum<double>(2.0);
  const at::Tensor tensor = at::ones({3});
  EXPECT_TRUE(scaled(kWho, tensor, c10d::ReduceOp::SUM).is_same(tensor));
  EXPECT_TRUE(scaled(kWho, tensor, twice).eq(2).all().item<bool>());
  EXPECT_TRUE(tensor.eq(1).all().item<bool>());
  scale(kWho, tensor, twice);
  EXPECT_TRUE(tensor.eq(2).all().item<bool>());
  scale(kWho, tensor, c10d::makePreMulSum<at::Tensor>(at::full({1}, 3.0, at::kDouble)));
  EXPECT_TRUE(tensor.eq(6).all().item<bool>());
  EXPECT_EQ(reduction_type_of(kWho, tensor, twice).op, Op::kSum);
  c10d::ReduceOp bare;
  bare.op_ = c10d::ReduceOp::PREMUL_SUM;
  COHORT_EXPECT_THROW_WITH(scale(kWho, tensor, bare), c10::Error, "PREMUL_SUM without a factor");
}

TEST(TensorsTest, RowsAreDealtOutToTheRanks) {
  const at::Tensor tensor = at::ones({6, 5}, at::kInt);
  const auto deal = [&](const std::vector<std::int64_t>& rows, int size) {
    std::vector<std::pair<std::ptrdiff_t, std::size_t>> parts;
    for (const Span part : rows_of(kWho, tensor, rows, size)) {
      parts.emplace_back(part.data - data_of(tensor), part.bytes);
    }
    return parts;
  };
  using Parts = std::vector<std::pair<std::ptrdiff_t, std::size_t>>;
  EXPECT_EQ(deal({}, 3), (Parts{{0, 40}, {40, 40}, {80, 40}}));
  EXPECT_EQ(deal({1, 0, 5}, 3), (Parts{{0, 20}, {20, 0}, {20, 100}}));
  COHORT_EXPECT_THROW_WITH(deal({}, 4), c10::Error, "got 6 rows, which do not divide by 4 ranks");
  COHORT_EXPECT_THROW_WITH(deal({1, 2}, 2), c10::Error, "got parts of [1, 2] rows, expected 6 in all");
  COHORT_EXPECT_THROW_WITH(deal({7, -1}, 2), c10::Error, "got parts of [7, -1] rows");
  COHORT_EXPECT_THROW_WITH(deal({6}, 2), c10::Error, "expected 6 in all for 2 ranks");
  COHORT_EXPECT_THROW_WITH(rows_of(kWho, tensor.t(), {}, 5), c10::Error, "expected a contiguous one");
}

}  // namespace
}  // namespace cohort::comm

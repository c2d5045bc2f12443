#include "cohort/ops/nms.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cohort/base/error.h"
#include "cohort/ops/check.h"
#include "cohort/optim/autocast.h"
#include "tests/support/throws.h"

namespace cohort::ops {
namespace {

/// The plain way: boxes one by one by falling score, each pair compared in full, the threshold in double.
template <typename T>
std::vector<std::int64_t> reference(const at::Tensor& boxes, const at::Tensor& scores, double threshold) {
  const auto b = boxes.accessor<T, 2>();
  const auto s = scores.accessor<T, 1>();
  std::vector<std::int64_t> order(static_cast<std::size_t>(scores.size(0))), kept;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t i, std::int64_t j) { return s[i] > s[j]; });
  for (const std::int64_t j : order) {
    const bool taken = std::any_of(kept.begin(), kept.end(), [&](std::int64_t i) {
      const T width = std::max(T(0), std::min(b[i][2], b[j][2]) - std::max(b[i][0], b[j][0]));
      const T height = std::max(T(0), std::min(b[i][3], b[j][3]) - std::max(b[i][1], b[j][1]));
      volatile T area_i = (b[i][2] - b[i][0]) * (b[i][3] - b[i][1]);  // rounded, not fused into the sum
      volatile T area_j = (b[j][2] - b[j][0]) * (b[j][3] - b[j][1]);
      volatile T both = width * height;
      const T overlap = both / (area_i + area_j - both);
      return static_cast<double>(overlap) > threshold;
    });
    if (!taken) kept.push_back(j);
  }
  return kept;
}

std::vector<std::int64_t> list(const at::Tensor& indices) {
  return {indices.data_ptr<std::int64_t>(), indices.data_ptr<std::int64_t>() + indices.numel()};
}

using Indices = std::vector<std::int64_t>;

at::Tensor boxes_of(std::int64_t count, at::ScalarType dtype, double grid) {
  // On a grid, so that equal overlaps and boxes without area come about.
  const at::Tensor corner = at::rand({count, 2}, at::kDouble) * 40,
                   size = at::rand({count, 2}, at::kDouble) * 12;
  return (at::cat({corner, corner + size}, 1) * grid).round().div(grid).to(dtype);
}

TEST(NmsTest, EqualsTheReferenceOnRandomBoxes) {
  at::manual_seed(11);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const std::int64_t count : {1, 2, 17, 64, 333}) {
      for (const double grid : {1.0, 1000.0}) {
        const at::Tensor boxes = boxes_of(count, dtype, grid);
        // Scores with ties.
        const at::Tensor scores = (at::rand({count}, at::kDouble) * 20).round().div(20).to(dtype);
        for (const double threshold : {0.0, 0.1, 0.25, 0.5, 0.7, 1.0}) {
          const Indices expected = dtype == at::kFloat ? reference<float>(boxes, scores, threshold)
                                                       : reference<double>(boxes, scores, threshold);
          ASSERT_EQ(list(nms(boxes, scores, threshold)), expected)
              << dtype << " " << count << " " << grid << " " << threshold;
        }
      }
    }
  }
}

TEST(NmsTest, ExactlyTheThresholdIsKept) {
  // Two boxes of 2 x 1 that share 1 x 1: an overlap of a third.
  const at::Tensor boxes = at::tensor({0.0, 0.0, 2.0, 1.0, 1.0, 0.0, 3.0, 1.0}, at::kDouble).view({2, 4});
  const at::Tensor scores = at::tensor({0.5, 0.9}, at::kDouble);
  EXPECT_EQ(list(nms(boxes, scores, 1.0 / 3)), Indices({1, 0}));
  EXPECT_EQ(list(nms(boxes, scores, std::nextafter(1.0 / 3, 0))), Indices({1}));
  // The overlap in float32 is a third rounded up: more than a third, and than what float32 has below it.
  const at::Tensor narrow = boxes.to(at::kFloat), narrow_scores = scores.to(at::kFloat);
  EXPECT_EQ(list(nms(narrow, narrow_scores, 1.0 / 3)), Indices({1}));
  EXPECT_EQ(list(nms(narrow, narrow_scores, static_cast<double>(1.0F / 3))), Indices({1, 0}));
}

TEST(NmsTest, OfEqualScoresTheFirstStays) {
  const at::Tensor boxes = at::tensor({0.0F, 0.0F, 1.0F, 1.0F}).repeat({3, 1});
  EXPECT_EQ(list(nms(boxes, at::ones({3}), 0.5)), Indices({0}));
  EXPECT_EQ(list(nms(boxes, at::tensor({1.0F, 2.0F, 2.0F}), 0.5)), Indices({1}));
}

TEST(NmsTest, ABoxThatWasTakenAwayTakesNoneAway) {
  // A chain: the second overlaps both others, which do not overlap each other.
  const at::Tensor boxes =
      at::tensor({0.0F, 0.0F, 4.0F, 1.0F, 2.0F, 0.0F, 6.0F, 1.0F, 4.0F, 0.0F, 8.0F, 1.0F}).view({3, 4});
  EXPECT_EQ(list(nms(boxes, at::tensor({3.0F, 2.0F, 1.0F}), 0.3)), Indices({0, 2}));
}

TEST(NmsTest, NoBoxesAndBoxesWithoutArea) {
  const at::Tensor none = nms(at::empty({0, 4}), at::empty({0}), 0.5);
  EXPECT_EQ(none.scalar_type(), at::kLong);
  EXPECT_EQ(none.sizes(), at::IntArrayRef({0}));
  EXPECT_EQ(list(nms(at::ones({3, 4}), at::ones({3}), 0.0)), Indices({0, 1, 2}));
}

TEST(NmsTest, ItsPartsAgree) {
  at::manual_seed(5);
  opcheck("cohort::nms", {boxes_of(20, at::kFloat, 1), at::rand({20}), 0.3}, OpcheckOptions().meta(false));
}

TEST(NmsTest, BoxesThatRequireAGradientAreFine) {
  at::manual_seed(5);
  const at::Tensor boxes = boxes_of(20, at::kFloat, 1).requires_grad_();
  EXPECT_FALSE(nms(boxes, at::rand({20}).requires_grad_(), 0.3).requires_grad());
}

TEST(NmsTest, UnderAutocastNarrowBoxesAreWidened) {
  const optim::Autocast autocast(at::kCPU, at::kBFloat16);
  EXPECT_EQ(list(nms(at::ones({1, 4}).to(at::kBFloat16), at::ones({1}), 0.5)), Indices({0}));
}

TEST(NmsTest, WhatDoesNotFitIsRejected) {
  COHORT_EXPECT_THROW_WITH(nms(at::ones({2, 5}), at::ones({2}), 0.5), UsageError,
                           "[ops.nms] got boxes [2, 5] and scores [2], expected [n, 4] and [n]");
  COHORT_EXPECT_THROW_WITH(nms(at::ones({2, 4}), at::ones({3}), 0.5), UsageError, "scores [3]");
  COHORT_EXPECT_THROW_WITH(nms(at::ones({2, 4}), at::ones({2}, at::kDouble), 0.5), UsageError,
                           "scores of Double");
  COHORT_EXPECT_THROW_WITH(nms(at::ones({2, 4}), at::ones({2}), std::nan("")), UsageError, "not a number");
}

}  // namespace
}  // namespace cohort::ops

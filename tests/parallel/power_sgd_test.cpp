#include "cohort/parallel/power_sgd.h"

#include <gtest/gtest.h>

#include "cohort/parallel/reducer.h"
#include "tests/parallel/nets.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

using test::wave;

// Gives a matrix, and beside it a vector, gradients of one's own; returns what is left of them after a step.
std::pair<at::Tensor, at::Tensor> reduced(Reducer& reducer, at::Tensor& matrix, at::Tensor& vector,
                                          const at::Tensor& gradient) {
  matrix.mutable_grad() = vector.mutable_grad() = at::Tensor();
  reducer.prepare();
  ((matrix * gradient).sum() + (vector * gradient.select(1, 0)).sum()).backward();
  return {matrix.grad().clone(), vector.grad().clone()};
}

at::Tensor outer(int rank) {
  return at::arange(1, 13, at::kDouble).unsqueeze(1) * (wave(1, 10) + rank);
}

TEST(PowerSgdTest, AMatrixOfThatRankComesThroughUnchangedAndFewerBytesTravel) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    at::Tensor matrix = at::zeros({12, 10}, at::kDouble).requires_grad_();
    at::Tensor vector = at::zeros({12}, at::kDouble).requires_grad_();
    const ReducerOptions options{.plan = BucketPlan::kDefinition,
                                 .hook = power_sgd_hook({.matrix_approximation_rank = 2, .start_iter = 2})};
    Reducer reducer(group, {{"matrix", matrix}, {"vector", vector}}, options);
    const at::Tensor mean = (outer(0) + outer(1)) / 2;  // of rank 1
    std::int64_t before = 0;
    for (int step = 0; step < 5; ++step) {
      const auto [m, v] = reduced(reducer, matrix, vector, outer(group.rank()));
      EXPECT_TRUE(at::allclose(m, mean, 1e-9, 1e-12)) << step;
      EXPECT_TRUE(at::allclose(v, mean.select(1, 0), 1e-12)) << "in full";
      const std::int64_t bytes = group.counters().at("all_reduce").bytes;
      EXPECT_EQ(bytes - before, 8 * (step < 2 ? 12 * 10 + 12 : 2 * (12 + 10) + 12)) << step;
      before = bytes;
    }
  });
}

TEST(PowerSgdTest, WhatIsNotSentIsAddedToTheNextStep) {
  // A matrix of full rank, the same in each step: what arrives over many steps is all of it.
  const auto relative_error = [](bool feedback, bool warm) {
    double error = 0;
    test::run_ranks(2, "shm", [&](comm::Group& group) {
      at::Tensor matrix = at::zeros({12, 10}, at::kDouble).requires_grad_();
      at::Tensor vector = at::zeros({12}, at::kDouble).requires_grad_();
      ReducerOptions options;
      options.hook = power_sgd_hook({.start_iter = 0, .use_error_feedback = feedback, .warm_start = warm});
      Reducer reducer(group, {{"matrix", matrix}, {"vector", vector}}, options);
      const auto gradient_of = [](int rank) { return (wave(12, 10) * (rank + 1)).exp(); };
      const at::Tensor mean = (gradient_of(0) + gradient_of(1)) / 2;
      at::Tensor sum = at::zeros_like(mean);
      constexpr int kSteps = 300;
      for (int step = 0; step < kSteps; ++step) {
        sum += reduced(reducer, matrix, vector, gradient_of(group.rank())).first;
      }
      if (group.rank() == 0) error = ((sum / kSteps - mean).norm() / mean.norm()).item<double>();
    });
    return error;
  };
  EXPECT_LT(relative_error(true, true), 0.03);
  EXPECT_LT(relative_error(true, false), 0.03);
  EXPECT_GT(relative_error(false, true), 0.1);
}

TEST(PowerSgdTest, ASmallMatrixTravelsInFullAndNonsenseIsRejected) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    at::Tensor matrix = at::zeros({12, 10}, at::kDouble).requires_grad_();
    at::Tensor vector = at::zeros({12}, at::kDouble).requires_grad_();
    ReducerOptions options;
    options.hook = power_sgd_hook({.start_iter = 0, .min_compression_rate = 6});  // 120 numbers against 22
    Reducer reducer(group, {{"matrix", matrix}, {"vector", vector}}, options);
    const at::Tensor gradient = wave(12, 10).exp() * (group.rank() + 1);
    const at::Tensor mean = wave(12, 10).exp() * 1.5;
    EXPECT_TRUE(at::allclose(reduced(reducer, matrix, vector, gradient).first, mean, 1e-12));
  });
  COHORT_EXPECT_THROW_WITH(power_sgd_hook({.matrix_approximation_rank = 0}), UsageError,
                           "expected at least 1");
}

}  // namespace
}  // namespace cohort::parallel

// Gradients of 16 bits: their mean over any number of ranks, and their norm.
#include <gtest/gtest.h>

#include "cohort/parallel/average.h"
#include "cohort/parallel/reducer.h"
#include "tests/parallel/nets.h"
#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace {

using test::make_stack;
using test::Stack;

// Gradients of many sizes, the same on all ranks: their mean is what each has.
double mean_ratio(comm::Group& group, at::ScalarType type, bool averager, double weight) {
  Stack net = make_stack(1, {40, 50}, type);
  const at::Tensor gradient = test::wave(50, 40) + 2;
  const auto loss = [&] { return (net->layers[0]->weight * gradient.to(type)).sum(); };
  if (averager) {
    loss().backward();
    GradientAverager(group).average(net->parameters(), weight);
  } else {
    Reducer reducer(group, parameters_to_reduce(*net), {.find_unused_parameters = true});
    reducer.prepare(StepInfo{.weight = weight});
    loss().backward();
    reducer.finish();
  }
  return (net->layers[0]->weight.grad().to(at::kDouble).sum() / gradient.to(type).to(at::kDouble).sum())
      .item<double>();
}

TEST(HalfPrecisionTest, TheMeanIsNotScaledByARoundedFactor) {
  for (const int size : {3, 6, 7}) {
    for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
      test::run_ranks(size, "shm", [&](comm::Group& group) {
        for (const bool averager : {false, true}) {
          EXPECT_NEAR(mean_ratio(group, type, averager, 1), 1, 3e-4)
              << size << " " << type << " " << averager;
          EXPECT_NEAR(mean_ratio(group, type, averager, 1 + group.rank()), 1, 3e-4)
              << size << " " << type << " " << averager;
        }
      });
    }
  }
}

TEST(HalfPrecisionTest, TheNormIsFiniteWhereTheGradientsAre) {
  test::run_ranks(2, "shm", [](comm::Group& group) {
    for (const at::ScalarType type : {at::kHalf, at::kBFloat16, at::kDouble}) {
      Stack net = make_stack(1, {512, 256}, type);
      Reducer reducer(group, parameters_to_reduce(*net), {.find_unused_parameters = true, .norm = true});
      reducer.prepare();
      (net->layers[0]->weight * 99).sum().backward();
      const double expected = 99 * std::sqrt(512.0 * 256.0);
      EXPECT_NEAR(*reducer.finish().norm, expected, expected * 1e-4) << type;
    }
  });
}

}  // namespace
}  // namespace cohort::parallel

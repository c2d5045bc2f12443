#include "cohort/train/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace cohort::train {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double exact(const std::vector<double>& values) {
  return ExactSum(values).value();
}

/// Doubles of all sizes, and their negatives now and then.
std::vector<double> draw_values(std::mt19937_64& random, int count, int most_exponent) {
  std::uniform_real_distribution<double> mantissa(-1, 1);
  std::uniform_int_distribution<int> exponent(-most_exponent, most_exponent);
  std::vector<double> values;
  for (int i = 0; i < count; ++i) {
    values.push_back(std::ldexp(mantissa(random), exponent(random)));
    if (i % 3 == 0) values.push_back(-values[random() % values.size()]);
  }
  return values;
}

TEST(ExactSumTest, NoOrderAndNoGroupingChangesASum) {
  std::mt19937_64 random(3);
  int differs_in_double = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<double> values = draw_values(random, 1 + round, round % 2 == 0 ? 20 : 1020);
    const double expected = exact(values);
    const std::vector<double> parts = ExactSum(values).parts();
    const double in_order = std::accumulate(values.begin(), values.end(), 0.0);
    std::ranges::shuffle(values, random);
    EXPECT_EQ(exact(values), expected);
    EXPECT_EQ(ExactSum(values).parts(), parts);
    if (std::accumulate(values.begin(), values.end(), 0.0) != in_order) ++differs_in_double;
    // In groups, each of which travels as its parts.
    ExactSum whole;
    for (std::size_t begin = 0; begin < values.size();) {
      const std::size_t end = std::min(values.size(), begin + 1 + random() % 7);
      const ExactSum group({values.begin() + static_cast<std::ptrdiff_t>(begin),
                            values.begin() + static_cast<std::ptrdiff_t>(end)});
      if (random() % 2 == 0) {
        whole.add(group);
      } else {
        whole.add(ExactSum(group.parts()));
      }
      begin = end;
    }
    EXPECT_EQ(whole.value(), expected);
    EXPECT_EQ(whole.parts(), parts);
  }
  EXPECT_GT(differs_in_double, 50) << "these numbers would not show a sum that rounds";
}

TEST(ExactSumTest, SumOfTwoIsRoundedAsTheProcessorRounds) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 20000; ++round) {
    const auto draw = [&] { return std::bit_cast<double>(random()); };
    const double a = draw();
    // Near in size, or a half of the last place away.
    const double b = round % 3 == 0 ? draw() : round % 3 == 1 ? a * 1.5e-16 : std::ldexp(a, -53);
    if (std::isnan(a) || std::isnan(b)) continue;
    EXPECT_EQ(exact({a, b}), a + b) << a << " and " << b;
  }
}

TEST(ExactSumTest, NothingIsLostOnTheWay) {
  constexpr double kMax = std::numeric_limits<double>::max(),
                   kTiny = std::numeric_limits<double>::denorm_min();
  EXPECT_EQ(exact({1e300, 1, -1e300}), 1);
  EXPECT_EQ(exact({kMax, kMax, -kMax}), kMax);
  EXPECT_EQ(exact({kMax, kMax}), kInf);
  EXPECT_EQ(exact({-kMax, -kMax}), -kInf);
  EXPECT_EQ(exact({kTiny, kTiny, -kMax, kMax}), 2 * kTiny);
  EXPECT_EQ(exact({}), 0);
  EXPECT_EQ(exact({1, -1}), 0);
  EXPECT_EQ(ExactSum({1, std::ldexp(1, -60)}).parts(), (std::vector<double>{1, std::ldexp(1, -60)}));
  EXPECT_EQ(ExactSum().parts(), std::vector<double>{0});
}

TEST(ExactSumTest, WhatIsNotFiniteCountsAsInAnySum) {
  EXPECT_EQ(exact({1, kInf, 2}), kInf);
  EXPECT_EQ(exact({1, -kInf}), -kInf);
  EXPECT_TRUE(std::isnan(exact({kInf, -kInf})));
  EXPECT_TRUE(std::isnan(exact({std::nan(""), 1})));
  EXPECT_EQ(ExactSum({kInf, 3}).parts(), std::vector<double>{kInf});
  ExactSum sum;
  sum.add(ExactSum({kInf}));
  EXPECT_EQ(sum.value(), kInf);
}

}  // namespace
}  // namespace cohort::train

#include "cohort/base/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace cohort::base {
namespace {

using PhiloxBlock = std::array<std::uint32_t, 4>;

// The vectors that Random123 (Salmon et al.) publishes for philox4x32 with ten rounds, in its file
// kat_vectors.
TEST(PhiloxTest, EqualsThePublishedVectors) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomStreamTest, IsAFunctionOfItsFourArgumentsOnly) {
  RandomStream a(7, 1, 42, Purpose::kTransform);
  RandomStream b(7, 1, 42, Purpose::kTransform);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(a.next_u64(), b.next_u64());
}

TEST(RandomStreamTest, EveryArgumentMattersInAllOfItsBits) {
  std::set<std::uint64_t> firsts;
  const auto add = [&](std::uint64_t seed, std::uint64_t epoch, std::uint64_t position, Purpose purpose) {
    EXPECT_TRUE(firsts.insert(RandomStream(seed, epoch, position, purpose).next_u64()).second)
        << seed << " " << epoch << " " << position;
  };
  add(0, 0, 0, Purpose::kTransform);
  for (int bit = 0; bit < 64; ++bit) add(1ull << bit, 0, 0, Purpose::kTransform);
  for (int bit = 0; bit < 32; ++bit) add(0, 1ull << bit, 0, Purpose::kTransform);
  for (int bit = 0; bit < 64; ++bit) add(0, 0, 1ull << bit, Purpose::kTransform);
  for (const Purpose purpose : {Purpose::kGenerator, Purpose::kSynthetic, Purpose::kUser})
    add(0, 0, 0, purpose);
}

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

double correlation(const std::vector<double>& a, const std::vector<double>& b) {
  const double mean_a = mean_of(a);
  const double mean_b = mean_of(b);
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - mean_a) * (b[i] - mean_b);
    aa += (a[i] - mean_a) * (a[i] - mean_a);
    bb += (b[i] - mean_b) * (b[i] - mean_b);
  }
  return ab / std::sqrt(aa * bb);
}

std::vector<double> first_draws(std::uint64_t seed, std::uint64_t epoch, Purpose purpose, int count) {
  std::vector<double> draws;
  for (int position = 0; position < count; ++position) {
    draws.push_back(RandomStream(seed, epoch, static_cast<std::uint64_t>(position), purpose).uniform());
  }
  return draws;
}

// 99.9 % of true uniform draws stay below the bound: chi-squared, 99 degrees of freedom.
double chi_squared_of_100_bins(const std::vector<double>& draws) {
  std::vector<int> bins(100);
  for (const double draw : draws) ++bins[static_cast<std::size_t>(draw * 100)];
  const double expected = static_cast<double>(draws.size()) / 100;
  double sum = 0;
  for (const int count : bins) sum += (count - expected) * (count - expected) / expected;
  return sum;
}

TEST(RandomStreamTest, DrawsOfOneStreamAreUniform) {
  RandomStream stream(1, 0, 0, Purpose::kUser);
  std::vector<double> draws;
  for (int i = 0; i < 100000; ++i) draws.push_back(stream.uniform());
  EXPECT_LT(chi_squared_of_100_bins(draws), 148.2);
  EXPECT_TRUE(std::all_of(draws.begin(), draws.end(), [](double d) { return d >= 0 && d < 1; }));
}

TEST(RandomStreamTest, FirstDrawsOfNeighbouringPositionsAreUniform) {
  EXPECT_LT(chi_squared_of_100_bins(first_draws(1, 0, Purpose::kTransform, 100000)), 148.2);
}

TEST(RandomStreamTest, PurposesEpochsAndSeedsAreIndependent) {
  const int count = 40000;
  const std::vector<double> base = first_draws(1, 0, Purpose::kTransform, count);
  const double bound =
      4 / std::sqrt(count);  // four standard deviations of the correlation of independent draws
  EXPECT_LT(std::abs(correlation(base, first_draws(1, 0, Purpose::kGenerator, count))), bound);
  EXPECT_LT(std::abs(correlation(base, first_draws(1, 0, Purpose::kUser, count))), bound);
  EXPECT_LT(std::abs(correlation(base, first_draws(1, 1, Purpose::kTransform, count))), bound);
  EXPECT_LT(std::abs(correlation(base, first_draws(2, 0, Purpose::kTransform, count))), bound);
}

TEST(RandomStreamTest, IntegersCoverTheirRangeEvenlyAndNothingElse) {
  RandomStream stream(3, 0, 0, Purpose::kUser);
  std::vector<int> counts(7);
  for (int i = 0; i < 70000; ++i) {
    const std::int64_t value = stream.integer(-3, 4);
    ASSERT_GE(value, -3);
    ASSERT_LT(value, 4);
    ++counts[static_cast<std::size_t>(value + 3)];
  }
  for (const int count : counts) EXPECT_NEAR(count, 10000, 400);
  EXPECT_EQ(stream.integer(5, 6), 5);
  EXPECT_LT(stream.integer(INT64_MIN, INT64_MAX), INT64_MAX);
}

TEST(RandomStreamTest, NormalsHaveMeanZeroAndDeviationOne) {
  RandomStream stream(5, 0, 0, Purpose::kUser);
  std::vector<double> draws;
  std::vector<double> squares;
  for (int i = 0; i < 100000; ++i) {
    draws.push_back(stream.normal());
    ASSERT_TRUE(std::isfinite(draws.back()));
    squares.push_back(draws.back() * draws.back());
  }
  EXPECT_NEAR(mean_of(draws), 0, 0.015);
  EXPECT_NEAR(mean_of(squares), 1, 0.02);
}

TEST(RandomStreamTest, BernoulliIsTrueAsOftenAsAsked) {
  RandomStream stream(6, 0, 0, Purpose::kUser);
  int heads = 0;
  for (int i = 0; i < 100000; ++i) heads += stream.bernoulli(0.3) ? 1 : 0;
  EXPECT_NEAR(heads, 30000, 600);
  EXPECT_FALSE(stream.bernoulli(0));
  EXPECT_TRUE(stream.bernoulli(1));
}

TEST(RandomStreamTest, GeneratorSeedsDifferByStepAndRankAndFitASignedNumber) {
  std::set<std::uint64_t> seeds;
  for (std::uint64_t step = 0; step < 100; ++step) {
    for (std::uint64_t rank = 0; rank < 8; ++rank) seeds.insert(generator_seed(1, step, rank));
  }
  EXPECT_EQ(seeds.size(), 800u);
  EXPECT_LE(*seeds.rbegin(), static_cast<std::uint64_t>(INT64_MAX));
}

// Runs that were recorded must come out again: these numbers are a promise.
TEST(RandomStreamTest, StreamsStayTheSameFromVersionToVersion) {
  RandomStream stream(1, 2, 3, Purpose::kTransform);
  EXPECT_EQ(stream.next_u32(), 533617253u);
  EXPECT_EQ(stream.next_u64(), 13599653438660941630ull);
  EXPECT_EQ(generator_seed(1, 2, 3), 4382937457355741592ull);
}

}  // namespace
}  // namespace cohort::base

#include "cohort/parallel/internal/buckets.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace cohort::parallel {
namespace {

std::vector<BucketItem> items_of(const std::vector<std::int64_t>& bytes, double every = 0) {
  std::vector<BucketItem> items;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    items.push_back({.bytes = bytes[i], .kind = "float cpu", .ready = every * static_cast<double>(i + 1)});
  }
  return items;
}

void expect_each_once(const BucketList& buckets, std::size_t count) {
  std::vector<std::size_t> all;
  for (const auto& bucket : buckets) all.insert(all.end(), bucket.begin(), bucket.end());
  std::ranges::sort(all);
  std::vector<std::size_t> want(count);
  std::iota(want.begin(), want.end(), 0);
  EXPECT_EQ(all, want);
}

TEST(BucketsTest, TheBucketThatIsCompleteLastIsSmall) {
  EXPECT_EQ(fill_buckets(items_of({40, 40, 40, 40, 40, 5, 5}), 10, 100),
            (BucketList{{0}, {1, 2}, {3, 4}, {5, 6}}));
}

TEST(BucketsTest, WhatIsLargerThanABucketGoesAlone) {
  EXPECT_EQ(fill_buckets(items_of({10, 500, 10, 10}), 10, 100), (BucketList{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(fill_buckets(items_of({10, 500, 10, 10}), 20, 100), (BucketList{{0}, {1}, {2, 3}}));
}

TEST(BucketsTest, KindsDoNotMixAndBucketsAreInTheOrderOfTheirLastItem) {
  auto items = items_of({8, 8, 8, 8, 8, 8});
  items[1].kind = items[4].kind = "half cpu";
  const BucketList buckets = fill_buckets(items, 8, 1000);
  EXPECT_EQ(buckets, (BucketList{{1}, {0, 2, 3}, {4}, {5}}));
}

TEST(BucketsTest, ALargeLatencyJoinsAndASmallOneCuts) {
  const auto items = items_of({100, 100, 100, 100}, 1.0);
  EXPECT_EQ(plan_buckets(items, {.latency = 100, .seconds_per_byte = 0}).size(), 1U);
  EXPECT_EQ(plan_buckets(items, {.latency = 1e-6, .seconds_per_byte = 0.01}).size(), 4U);
}

// Every way to cut, by the bits of a number.
TEST(BucketsTest, NoOtherCutFinishesEarlier) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 30; ++trial) {
    std::vector<BucketItem> items = items_of(std::vector<std::int64_t>(10, 0));
    double ready = 0;
    for (BucketItem& item : items) {
      item.bytes = 1 + static_cast<std::int64_t>(random() % 1000);
      item.ready = ready += static_cast<double>(random() % 100) * 1e-3;
    }
    const LinkCost link{.latency = static_cast<double>(random() % 50) * 1e-3 + 1e-6,
                        .seconds_per_byte = static_cast<double>(random() % 10) * 1e-5};
    const BucketList planned = plan_buckets(items, link);
    expect_each_once(planned, items.size());
    double best = 1e9;
    for (unsigned cuts = 0; cuts < 1U << 9; ++cuts) {
      BucketList buckets(1);
      for (std::size_t i = 0; i < items.size(); ++i) {
        if (i > 0 && (cuts >> (i - 1) & 1U) != 0) buckets.emplace_back();
        buckets.back().push_back(i);
      }
      best = std::min(best, finish_time(items, buckets, link));
    }
    EXPECT_NEAR(finish_time(items, planned, link), best, 1e-9);
  }
}

TEST(BucketsTest, ManySmallAndOneLargeFinishEarlierThanBySize) {
  // A large layer that comes first, then hundreds of small ones: by size they would wait to fill a bucket.
  std::vector<std::int64_t> bytes(200, 4000);
  bytes.insert(bytes.begin(), 40 << 20);
  const auto items = items_of(bytes, 50e-6);
  const LinkCost link{.latency = 20e-6, .seconds_per_byte = 1.0 / 10e9};
  const BucketList planned = plan_buckets(items, link);
  expect_each_once(planned, items.size());
  EXPECT_LT(finish_time(items, planned, link),
            finish_time(items, fill_buckets(items, 1 << 20, 25 << 20), link) * 0.999);
}

}  // namespace
}  // namespace cohort::parallel

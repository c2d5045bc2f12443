#include "cohort/rpc/internal/telemetry/call_statistics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/support/slowdown.h"

namespace cohort::rpc {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

TEST(CallStatisticsTest, ARateIsThatOfTheLastTenSeconds) {
  const Rate::Time begin = Rate::Time::clock::now();
  Rate rate(begin);
  EXPECT_EQ(rate.per_second(begin), 0);
  for (int i = 0; i < 50; ++i) rate.add(begin + milliseconds(10 * i));
  EXPECT_EQ(rate.per_second(begin + milliseconds(500)), 50) << "a second is the shortest time";
  EXPECT_EQ(rate.per_second(begin + seconds(5)), 10);
  for (int i = 0; i < 2000; ++i) rate.add(begin + seconds(5) + milliseconds(10 * i));
  EXPECT_NEAR(rate.per_second(begin + seconds(25)), 100, 0.1);
  EXPECT_NEAR(rate.per_second(begin + milliseconds(24'999)), 100, 0.1);
  EXPECT_NEAR(rate.per_second(begin + milliseconds(29'500)), 100 * 5 / 9.5, 0.1);
  EXPECT_EQ(rate.per_second(begin + seconds(36)), 0);
  rate.add(begin + seconds(1000));
  EXPECT_NEAR(rate.per_second(begin + seconds(1000)), 1 / 9.0, 0.001) << "old slots are used again";
}

TEST(CallStatisticsTest, AQuantileIsAnEighthTooLongAtMost) {
  LatencyHistogram histogram;
  EXPECT_EQ(histogram.quantile(0.5).count(), 0);
  EXPECT_EQ(histogram.max().count(), 0);
  std::vector<nanoseconds> times;
  std::int64_t value = 1;
  for (int i = 0; i < 1000; ++i) {
    value = value * 48'271 % 2'147'483'647;
    times.push_back(nanoseconds(value >> (i % 31)));  // of all sizes
    histogram.add(times.back());
  }
  std::sort(times.begin(), times.end());
  for (const double share : {0.001, 0.1, 0.5, 0.9, 0.99, 1.0}) {
    const nanoseconds exact = times.at(static_cast<std::size_t>(share * 1000) - 1);
    EXPECT_GE(histogram.quantile(share), exact) << share;
    EXPECT_LE(histogram.quantile(share).count(), exact.count() + exact.count() / 8) << share;
  }
  EXPECT_EQ(histogram.max(), times.back());
  EXPECT_EQ(histogram.quantile(1), times.back());
  for (const nanoseconds end : {nanoseconds(-1), nanoseconds(0), nanoseconds::max()}) histogram.add(end);
  EXPECT_EQ(histogram.max(), nanoseconds::max());
}

TEST(CallStatisticsTest, OldTimesAreForgottenInMemoryOfFixedSize) {
  static_assert(sizeof(CallStatistics::Function) < 2100);
  LatencyHistogram histogram;
  histogram.add(seconds(5));
  for (int i = 0; i < 1023; ++i) histogram.add(milliseconds(1));
  EXPECT_EQ(histogram.max(), seconds(5)) << "the last 1,024 stay";
  for (int i = 0; i < 1023; ++i) histogram.add(milliseconds(1));
  EXPECT_EQ(histogram.max(), seconds(5));
  for (int i = 0; i < 2; ++i) histogram.add(milliseconds(1));
  EXPECT_EQ(histogram.max(), milliseconds(1));
  EXPECT_EQ(histogram.quantile(0.99), milliseconds(1)) << "no longer than the longest";
}

// Two readings of the clock, and what happens under the agent's mutex.
TEST(CallStatisticsTest, ToCountACallTakesLessThanAMicrosecond) {
  constexpr int kCalls = 2000;
  CallStatistics statistics(Rate::Time::clock::now());
  nanoseconds best = nanoseconds::max();
  for (int round = 0; round < 20; ++round) {
    const auto begin = Rate::Time::clock::now();
    for (int i = 0; i < kCalls; ++i) {
      const auto begun = Rate::Time::clock::now();
      CallStatistics::Function& function =
          statistics.count_made(i % 2 == 0 ? "Table::lookup" : "Table::add_gradients", begun);
      const auto end = Rate::Time::clock::now();
      statistics.count_end(function, end - begun, false);
      statistics.count_handled(end);
    }
    best = std::min<nanoseconds>(best, (Rate::Time::clock::now() - begin) / kCalls);
  }
  EXPECT_LT(best, microseconds(1) * test::kSlowdown);
}

}  // namespace
}  // namespace cohort::rpc

#include "cohort/launch/internal/members/place_failures.h"

#include <gtest/gtest.h>

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;

TEST(PlaceFailuresTest, FailuresInARowAreCountedForEachPlace) {
  PlaceFailures failures;
  const PlaceFailures::Time now;
  EXPECT_EQ(failures.note(0, 7, now), 1);
  EXPECT_EQ(failures.note(1, 7, now), 1);
  EXPECT_EQ(failures.note(0, 7, now), 2);
  EXPECT_EQ(failures.note(0, 8, now), 1) << "a step was made since";
  EXPECT_EQ(failures.note(1, 8, now), 1);
}

TEST(PlaceFailuresTest, TheFirstSuccessorStartsAtOnceAndTheOthersLaterAndLater) {
  PlaceFailures failures;
  PlaceFailures::Time now;
  EXPECT_FALSE(failures.take_due(0, now)) << "nothing has failed";
  for (const int pause_ms : {0, 500, 1'000, 2'000, 4'000, 8'000, 16'000, 30'000, 30'000}) {
    failures.note(0, 0, now);
    if (pause_ms > 0) EXPECT_FALSE(failures.take_due(0, now + milliseconds(pause_ms - 1))) << pause_ms;
    now += milliseconds(pause_ms);
    EXPECT_TRUE(failures.take_due(0, now)) << pause_ms;
    EXPECT_FALSE(failures.take_due(0, now)) << "once";
  }
}

}  // namespace
}  // namespace cohort::launch

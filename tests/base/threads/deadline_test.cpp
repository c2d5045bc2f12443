#include "cohort/base/threads/deadline.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>

#include "tests/support/throws.h"

namespace cohort::base {
namespace {

using namespace std::chrono_literals;

TEST(DeadlineTest, IsNotExpiredBeforeAndIsAfterwards) {
  EXPECT_FALSE(Deadline(10s).expired());
  const Deadline deadline(30ms);
  EXPECT_LE(deadline.remaining(), 30ms);
  std::this_thread::sleep_for(40ms);
  EXPECT_TRUE(deadline.expired());
  EXPECT_EQ(deadline.remaining(), 0ms);
  EXPECT_EQ(deadline.remaining_ms(), 0);
}

TEST(DeadlineTest, NegativeTimeoutHasPassedAlready) {
  EXPECT_TRUE(Deadline(-1s).expired());
  EXPECT_TRUE(Deadline(std::chrono::seconds::min()).expired());
}

TEST(DeadlineTest, NeverAndTimeoutsTooLongForTheClockDoNotPass) {
  for (const Deadline deadline :
       {Deadline::never(), Deadline(std::chrono::hours::max()),
        Deadline(std::chrono::duration<double>(std::numeric_limits<double>::infinity()))}) {
    EXPECT_TRUE(deadline.is_never());
    EXPECT_FALSE(deadline.expired());
    EXPECT_EQ(deadline.remaining_ms(), std::numeric_limits<int>::max());
    EXPECT_NO_THROW(deadline.check("a.b", "c"));
  }
}

TEST(DeadlineTest, MillisecondsAreRoundedUpSoThatPollDoesNotSpin) {
  const Deadline deadline(500us);
  const int left = deadline.remaining_ms();
  EXPECT_TRUE(left == 1 || deadline.expired()) << left;
}

TEST(DeadlineTest, SoonerIsTheEarlierOfTwo) {
  const Deadline near(1s);
  const Deadline far(1h);
  EXPECT_EQ(near.sooner(far).end(), near.end());
  EXPECT_EQ(far.sooner(near).end(), near.end());
}

TEST(DeadlineTest, CheckNamesWhatWasWaitedForAndHowLong) {
  const Deadline deadline(5ms);
  EXPECT_NO_THROW(Deadline(1h).check("comm.recv", "rank 3"));
  std::this_thread::sleep_for(10ms);
  COHORT_EXPECT_THROW_WITH(deadline.check("comm.recv", "rank 3", "a longer timeout"), TimeoutError,
                           "ms for rank 3. Try: a longer timeout");
  COHORT_EXPECT_THROW_WITH(deadline.check("comm.recv", "rank 3"), TimeoutError, "[comm.recv] waited ");
}

}  // namespace
}  // namespace cohort::base

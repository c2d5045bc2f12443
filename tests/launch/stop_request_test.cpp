#include "cohort/launch/internal/stop_request.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "cohort/base/signals.h"
#include "cohort/launch/internal/signal_queue.h"
#include "tests/support/comes_true.h"

namespace cohort::launch {
namespace {

using SignalType = StopRequest::SignalType;

TEST(StopRequestTest, TheFirstSignalIsTheRequestAndAnotherOneKills) {
  StopRequest stop;
  EXPECT_EQ(stop.number(), 0);
  EXPECT_EQ(stop.receive(SIGINT), SignalType::kFirst);
  stop.begin_repeat_time();
  EXPECT_FALSE(stop.must_kill());
  EXPECT_EQ(stop.receive(SIGTERM), SignalType::kSecond);
  EXPECT_TRUE(stop.must_kill());
  EXPECT_EQ(stop.number(), SIGINT) << "the job ends by the first one";
}

TEST(StopRequestTest, TheSameSignalIsARepeatOnlyForAWhileAfterItWasActedOn) {
  StopRequest stop;
  stop.receive(SIGTERM);
  // Ranks may be told for longer than the time for repeats, which has not begun.
  const base::Deadline passed(base::kSameSignalTime);
  ASSERT_TRUE(test::comes_true([&] { return passed.expired(); }));
  EXPECT_EQ(stop.receive(SIGTERM), SignalType::kRepeat);
  const base::Deadline begun(base::kSameSignalTime);
  stop.begin_repeat_time();
  if (const SignalType type = stop.receive(SIGTERM); !begun.expired()) EXPECT_EQ(type, SignalType::kRepeat);
  const base::Deadline over(base::kSameSignalTime);
  ASSERT_TRUE(test::comes_true([&] { return over.expired(); }));
  stop.begin_repeat_time();  // does not begin the time again
  EXPECT_EQ(stop.receive(SIGTERM), SignalType::kSecond);
}

TEST(StopRequestTest, TheSignalOfAnotherNodeIsTheRequestAndTheFirstOneHereRepeatsIt) {
  StopRequest stop;
  EXPECT_FALSE(stop.adopt(0));
  EXPECT_EQ(stop.number(), 0);
  EXPECT_TRUE(stop.adopt(SIGTERM));
  EXPECT_FALSE(stop.adopt(SIGINT)) << "there is a request";
  EXPECT_EQ(stop.number(), SIGTERM);
  EXPECT_EQ(stop.receive(SIGTERM), SignalType::kRepeat);
  EXPECT_FALSE(stop.must_kill());
  EXPECT_EQ(stop.receive(SIGINT), SignalType::kSecond);
}

TEST(StopRequestTest, BeforeThereAreRanksTheFirstSignalIsTheReasonAndThoseForRanksDoNothing) {
  SignalQueue signals({SIGINT, SIGTERM}, {SIGUSR1, SIGUSR2});
  StopRequest stop;
  ::raise(SIGUSR1);
  ::raise(SIGUSR2);
  EXPECT_FALSE(take_stop_signal(signals, stop));
  EXPECT_EQ(stop.number(), 0);
  ::raise(SIGINT);
  ::raise(SIGTERM);
  EXPECT_TRUE(take_stop_signal(signals, stop));
  EXPECT_TRUE(take_stop_signal(signals, stop)) << "the second one";
  EXPECT_EQ(stop.number(), SIGINT);
}

TEST(SignalQueueOrderTest, SignalsThatWaitTogetherComeInTheOrderOfTheirNumbers) {
  SignalQueue signals({SIGINT, SIGTERM}, {});
  sigset_t both, before;
  ::sigemptyset(&both);
  ::sigaddset(&both, SIGINT);
  ::sigaddset(&both, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &both, &before);
  ::raise(SIGINT);
  ::raise(SIGTERM);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_EQ(signals.take(), SIGINT);
  EXPECT_EQ(signals.take(), SIGTERM);
}

}  // namespace
}  // namespace cohort::launch

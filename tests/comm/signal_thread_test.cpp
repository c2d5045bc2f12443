#include "cohort/comm/internal/signal_thread.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/comes_true.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

TEST(SignalThreadTest, ActsOnEachSignalUntilItIsStopped) {
  std::atomic<int> num_acts{0};
  const auto signals = std::make_shared<SignalThread>(SIGUSR1);
  signals->start([&] { ++num_acts; });
  for (int expected = 1; expected <= 3; ++expected) {
    ::raise(SIGUSR1);
    EXPECT_TRUE(test::comes_true([&] { return num_acts == expected; })) << num_acts;
  }
  signals->stop();
  EXPECT_EQ(num_acts, 3) << "the end is no signal";
  struct sigaction now {};
  ASSERT_EQ(::sigaction(SIGUSR1, nullptr, &now), 0);
  EXPECT_EQ(now.sa_handler, SIG_DFL) << "the handler that was there before is back";
}

TEST(SignalThreadTest, WhatItsFunctionHoldsGoesWithTheThread) {
  auto held = std::make_shared<int>(0);
  const auto signals = std::make_shared<SignalThread>(SIGUSR1);
  signals->start([held] {});
  EXPECT_EQ(held.use_count(), 2);
  signals->stop();
  EXPECT_EQ(held.use_count(), 1);
}

TEST(SignalThreadTest, OneRunsInAProcess) {
  const auto first = std::make_shared<SignalThread>(SIGUSR1),
             second = std::make_shared<SignalThread>(SIGUSR2);
  first->start([] {});
  COHORT_EXPECT_THROW_WITH(second->start([] {}), UsageError, "another watch of this process has a signal");
  first->stop();
  second->start([] {});
  second->stop();
}

TEST(SignalThreadTest, ASignalThatCannotBeHandledLeavesRoomForAnother) {
  const auto kill = std::make_shared<SignalThread>(SIGKILL), usr1 = std::make_shared<SignalThread>(SIGUSR1);
  COHORT_EXPECT_THROW_WITH(kill->start([] {}), UsageError, "cannot handle signal 9");
  kill->stop();
  usr1->start([] {});
  usr1->stop();
}

TEST(SignalThreadTest, WithoutASignalNothingStarts) {
  const auto none = std::make_shared<SignalThread>(0), usr1 = std::make_shared<SignalThread>(SIGUSR1);
  none->start([] { ADD_FAILURE() << "there is no signal"; });
  usr1->start([] {});
  none->stop();
  COHORT_EXPECT_THROW_WITH(std::make_shared<SignalThread>(SIGUSR2)->start([] {}), UsageError,
                           "another watch");
  usr1->stop();
}

}  // namespace
}  // namespace cohort::comm

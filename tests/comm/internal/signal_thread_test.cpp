#include "cohort/comm/internal/signal_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
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

// Its function takes longer than stop() waits, as a report that nobody reads.
TEST(SignalThreadTest, AThreadThatIsLeftBehindTakesNoSignalOfTheNextOne) {
  struct State {
    std::atomic<bool> is_acting{false}, may_end{false};
    std::atomic<int> num_acts{0};
  };
  const auto state = std::make_shared<State>();
  auto first = std::make_shared<SignalThread>(SIGUSR1);
  first->start([state] {
    state->is_acting = true;
    test::comes_true([&] { return state->may_end.load(); });
  });
  ::raise(SIGUSR1);
  ASSERT_TRUE(test::comes_true([&] { return state->is_acting.load(); }));
  ::raise(SIGUSR1);  // the thread is busy, and does not read it any more
  first->stop();
  const std::weak_ptr<SignalThread> left_behind = first;
  first.reset();
  ASSERT_FALSE(left_behind.expired()) << "its thread holds it";
  const auto second = std::make_shared<SignalThread>(SIGUSR1);
  second->start([state] { ++state->num_acts; });
  base::sleep(std::chrono::milliseconds(200), base::Deadline::never());
  EXPECT_EQ(state->num_acts, 0) << "what the first thread did not read is no signal of the second";
  state->may_end = true;
  EXPECT_TRUE(test::comes_true([&] { return left_behind.expired(); })) << "it waits for a signal";
  for (int expected = 1; expected <= 3; ++expected) {
    ::raise(SIGUSR1);
    EXPECT_TRUE(test::comes_true([&] { return state->num_acts == expected; })) << state->num_acts;
  }
  second->stop();
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

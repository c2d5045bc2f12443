#include "cohort/base/threads/wait.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <thread>

#include "cohort/base/files/fd.h"
#include "cohort/base/threads/future.h"

namespace cohort::base {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kShort(30);
constexpr milliseconds kLong(30'000);  // of a wait that a test ends

TEST(WaitTest, AConditionThatHoldsIsTakenWithoutWaitingPastADeadlineToo) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  EXPECT_TRUE(wait(changed, lock, [] { return true; }, Deadline(milliseconds(-1))));
  EXPECT_TRUE(poll_until([] { return true; }, Deadline(milliseconds(-1))));
  EXPECT_TRUE(lock.owns_lock());
}

TEST(WaitTest, EveryKindEndsAtItsDeadlineAndNotBefore) {
  std::mutex mutex;
  std::condition_variable changed;
  Promise<void> promise("a promise");
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const Fd read(ends[0]), write(ends[1]);
  const auto ends_in_time = [](const auto& waits) {
    const Deadline deadline(kShort);
    EXPECT_FALSE(waits(deadline));
    EXPECT_GE(deadline.elapsed(), kShort);
    EXPECT_LT(deadline.elapsed(), kLong);
  };
  std::unique_lock lock(mutex);
  ends_in_time([&](Deadline deadline) { return wait(changed, lock, [] { return false; }, deadline); });
  ends_in_time([&](Deadline deadline) { return promise.future().wait(deadline); });
  ends_in_time([](Deadline deadline) { return poll_until([] { return false; }, deadline); });
  ends_in_time([&](Deadline deadline) {
    pollfd file{read.get(), POLLIN, 0};
    return wait_for_files({&file, 1}, deadline) > 0;
  });
  const pid_t child = ::fork();
  if (child == 0) ::pause();
  ends_in_time([&](Deadline deadline) {
    int status = 0;
    return wait_for_process(child, status, deadline);
  });
  ::kill(child, SIGKILL);
  int status = 0;
  EXPECT_TRUE(wait_for_process(child, status, Deadline(kLong)));
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_FALSE(wait_for_process(child, status, Deadline(kLong))) << "it is no child any more";
}

TEST(WaitTest, AConditionThatAnotherThreadMakesHoldEndsTheWait) {
  for (const Deadline deadline : {Deadline(kLong), Deadline::never()}) {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_so = false;
    Promise<void> promise("a promise");
    const Future<void> future = promise.future();
    std::thread other([&] {
      std::this_thread::sleep_for(kShort);
      {
        const std::lock_guard lock(mutex);
        is_so = true;
      }
      changed.notify_all();
      promise.set();
    });
    {
      std::unique_lock lock(mutex);
      EXPECT_TRUE(wait(changed, lock, [&] { return is_so; }, deadline));
    }
    EXPECT_TRUE(future.wait(deadline));
    other.join();
  }
}

// Who sleeps past the deadline looks once more: what came in the last pause counts.
TEST(WaitTest, WhatHoldsAtTheLastLookCounts) {
  const Deadline deadline(kShort);
  int looks = 0;
  EXPECT_TRUE(poll_until(
      [&] {
        ++looks;
        return deadline.expired();
      },
      deadline, kLong));
  EXPECT_LE(looks, 12) << "pauses grow";
}

TEST(WaitTest, APauseEndsAtTheDeadline) {
  const Deadline deadline(kShort);
  base::sleep(2 * kLong, deadline);
  EXPECT_LT(deadline.elapsed(), kLong);
}

TEST(WaitTest, AFileThatIsReadyIsNamedByItsEvents) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const Fd read(ends[0]);
  Fd write(ends[1]);
  EXPECT_EQ(ready_events(read.get(), POLLIN), 0);
  EXPECT_EQ(ready_events(write.get(), POLLOUT), POLLOUT);
  ASSERT_EQ(::write(write.get(), "a", 1), 1);
  std::array<pollfd, 2> files{{{-1, POLLIN, 0}, {read.get(), POLLIN, 0}}};
  EXPECT_EQ(wait_for_files(files, Deadline::never()), 1);
  EXPECT_EQ(files[1].revents, POLLIN);
  write.close();
  EXPECT_EQ(ready_events(read.get(), POLLIN), POLLIN | POLLHUP);
}

void do_nothing(int) {}

TEST(WaitTest, ASignalThatIsHandledEndsAWaitForFiles) {
  struct sigaction action {
  }, before{};
  action.sa_handler = &do_nothing;
  ASSERT_EQ(::sigaction(SIGUSR2, &action, &before), 0);
  const pthread_t waiter = ::pthread_self();
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    while (!is_over) {  // one sent before the wait begins is lost
      ::pthread_kill(waiter, SIGUSR2);
      std::this_thread::sleep_for(milliseconds(5));
    }
  });
  const Deadline deadline(kLong);
  EXPECT_EQ(wait_for_files({}, deadline), 0);
  EXPECT_LT(deadline.elapsed(), kLong);
  is_over = true;
  other.join();
  ::sigaction(SIGUSR2, &before, nullptr);
}

}  // namespace
}  // namespace cohort::base

#include "cohort/rpc/internal/timers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "cohort/base/threads/wait.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/gate.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using Clock = base::Deadline::Clock;

TEST(TimersTest, FunctionsRunAtTheirTimesInOrder) {
  Timers timers;
  std::mutex mutex;
  std::vector<int> order;
  std::atomic<int> count{0};
  const auto begin = Clock::now();
  Clock::time_point last;
  for (const int number : {3, 1, 2}) {
    timers.add(begin + milliseconds(20 * number), [&, number] {
      const std::lock_guard lock(mutex);
      order.push_back(number);
      last = Clock::now();
      ++count;
    });
  }
  ASSERT_TRUE(test::comes_true([&] { return count == 3; }));
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_GE(last - begin, milliseconds(60));
  EXPECT_LT(last - begin, milliseconds(60) + test::deadline_slack());
}

TEST(TimersTest, AThreadThatSleepsIsWokenForTheFirstAndForAnEarlierOne) {
  Timers timers;
  base::sleep(milliseconds(50), base::Deadline(std::chrono::seconds(1)));  // it has nothing to do
  std::atomic<int> count{0};
  timers.add(Clock::now() + std::chrono::hours(1), [] {});
  base::sleep(milliseconds(50), base::Deadline(std::chrono::seconds(1)));
  const auto begin = Clock::now();
  timers.add(begin + milliseconds(10), [&] { ++count; });
  ASSERT_TRUE(test::comes_true([&] { return count == 1; }));
  EXPECT_LT(Clock::now() - begin, milliseconds(10) + test::deadline_slack());
}

TEST(TimersTest, OneThatWasRemovedDoesNotRunAndIsDropped) {
  Timers timers;
  const auto token = std::make_shared<int>(1);
  std::atomic<bool> has_run{false};
  const Timers::Key key = timers.add(Clock::now() + milliseconds(30), [&, token] { has_run = true; });
  EXPECT_EQ(token.use_count(), 2);
  timers.remove(key);
  EXPECT_EQ(token.use_count(), 1);
  timers.remove(key);
  std::atomic<bool> is_later{false};
  timers.add(Clock::now() + milliseconds(60), [&] { is_later = true; });
  EXPECT_TRUE(test::comes_true([&] { return is_later.load(); }));
  EXPECT_FALSE(has_run);
}

TEST(TimersTest, FunctionsThatTakeLongDoNotHoldUpOthers) {
  test::Gate gate;
  std::atomic<int> num_waiting{0}, num_past_gate{0}, num_called{0};
  {
    Timers timers;
    for (int i = 1; i <= 3; ++i) {
      timers.add(Clock::now(), [&] {
        ++num_waiting;
        gate.wait();
        ++num_past_gate;
      });
      ASSERT_TRUE(test::comes_true([&] { return num_waiting == i; }));
      const auto begin = Clock::now();
      timers.add(begin + milliseconds(20), [&] { ++num_called; });
      ASSERT_TRUE(test::comes_true([&] { return num_called == i; }));
      EXPECT_LT(Clock::now() - begin, milliseconds(20) + test::deadline_slack());
    }
    EXPECT_EQ(num_past_gate, 0);
    timers.add(Clock::now(), [&] { gate.open(); });
    ASSERT_TRUE(test::comes_true([&] { return num_past_gate > 0; }));
  }
  EXPECT_EQ(num_past_gate, 3) << "their owner is destroyed now";
}

TEST(TimersTest, AFunctionMayDestroyTheTimers) {
  auto timers = std::make_unique<Timers>();
  std::atomic<bool> has_run{false};
  const auto token = std::make_shared<int>(1);
  timers->add(Clock::now() + std::chrono::hours(1), [token] {});
  timers->add(Clock::now() + milliseconds(30), [&] {
    timers.reset();
    has_run = true;
  });
  EXPECT_TRUE(test::comes_true([&] { return has_run && token.use_count() == 1; })) << "the thread ends";
}

TEST(TimersTest, WhatAFunctionHoldsMayAddAnotherAsItIsDropped) {
  auto timers = std::make_unique<Timers>();
  std::atomic<bool> is_later{false};
  std::shared_ptr<void> adds(nullptr, [&](void*) { timers->add(Clock::now(), [&] { is_later = true; }); });
  timers->add(Clock::now() + milliseconds(10), [adds] {});
  adds.reset();
  if (test::comes_true([&] { return is_later.load(); })) return;
  static_cast<void>(timers.release());  // its thread waits for itself, and would not end
  FAIL() << "the function was dropped under the mutex";
}

TEST(TimersTest, WhatIsLeftIsDropped) {
  const auto token = std::make_shared<int>(1);
  {
    Timers timers;
    timers.add(Clock::now() + std::chrono::hours(1), [token] {});
  }
  EXPECT_EQ(token.use_count(), 1);
}

}  // namespace
}  // namespace cohort::rpc

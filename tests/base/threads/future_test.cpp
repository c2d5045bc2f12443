#include "cohort/base/threads/future.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/run_detached.h"
#include "cohort/base/threads/wait.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

using namespace std::chrono_literals;

using test::patience;

TEST(FutureTest, HasTheValueOrWhatWasThrown) {
  Promise<std::unique_ptr<int>> number("a number");
  Future<std::unique_ptr<int>> future = number.future();
  EXPECT_FALSE(future.ready());
  number.run([] { return std::make_unique<int>(7); });
  EXPECT_TRUE(future.ready());
  EXPECT_EQ(*future.get(patience()), 7);
  EXPECT_FALSE(future.valid());

  Promise<int> failed("a number");
  Future<int> error = failed.future();
  failed.run([]() -> int { throw DataError("test", "broken"); });
  COHORT_EXPECT_THROW_WITH(error.get(patience()), DataError, "broken");
}

TEST(FutureTest, ATimeoutNamesWhatWasWaitedForAndAbandonsIt) {
  Promise<int> promise("the answer");
  Future<int> future = promise.future(), copy = future;
  EXPECT_FALSE(future.wait(Deadline(1ms)));
  COHORT_EXPECT_THROW_WITH(future.get(Deadline(1ms)), TimeoutError, "the answer");
  promise.run([] { return 42; });
  EXPECT_FALSE(copy.abandon()) << "it is there";
  EXPECT_EQ(copy.get(patience()), 42);
}

TEST(FutureTest, APromiseThatIsGoneIsAnError) {
  Future<void> future;
  {
    Promise<void> promise("the answer");
    future = promise.future();
  }
  COHORT_EXPECT_THROW_WITH(future.get(patience()), UsageError, "the answer will never come");
}

TEST(FutureTest, AResultIsSetOnce) {
  constexpr const char* kError = "the answer is set a second time";
  Promise<int> promise("the answer");
  Future<int> future = promise.future();
  bool is_called = false;
  const auto fn = [&] {
    is_called = true;
    return 7;
  };
  promise.run([&] {  // also while it is being set
    COHORT_EXPECT_THROW_WITH(promise.run(fn), UsageError, kError);
    return 42;
  });
  COHORT_EXPECT_THROW_WITH(promise.run(fn), UsageError, kError);
  COHORT_EXPECT_THROW_WITH(promise.set_error(nullptr), UsageError, kError);
  EXPECT_FALSE(is_called);
  EXPECT_EQ(future.get(patience()), 42);
}

TEST(FutureTest, OfTwoThatMaySetAResultTheFirstDoesAndNothingIsThrown) {
  Promise<int> promise("the answer");
  EXPECT_TRUE(promise.try_run([] { return 42; }));
  bool is_called = false;
  EXPECT_FALSE(promise.try_run([&] { return is_called = true; }));
  EXPECT_FALSE(promise.try_set_error(std::make_exception_ptr(DataError("test", "late"))));
  EXPECT_FALSE(is_called);
  EXPECT_EQ(promise.future().get(patience()), 42);
  for (int round = 0; round < 200; ++round) {
    Promise<void> end("the end");
    std::atomic<int> num_set{0};
    const auto set = [&] { num_set += end.try_set() ? 1 : 0; };
    std::thread other(set);
    num_set += end.try_set_error(std::make_exception_ptr(DataError("test", "broken"))) ? 1 : 0;
    other.join();
    EXPECT_EQ(num_set, 1);
    EXPECT_TRUE(end.future().ready());
  }
}

// A function of on_ready() ends the process where it throws.
TEST(FutureTest, FunctionsOfTwoResultsMaySetAThird) {
  Promise<int> first("a number"), second("a number");
  Promise<void> either("one of two");
  int num_late = 0;
  const auto set = [&] { num_late += either.try_set() ? 0 : 1; };
  first.future().on_ready(set);
  second.future().on_ready(set);
  second.set_error(std::make_exception_ptr(DataError("test", "broken")));
  first.run([] { return 1; });
  either.future().get(patience());
  EXPECT_EQ(num_late, 1);
}

TEST(FutureTest, ACopyOfOneWithoutAValueMayBeAskedToo) {
  Promise<void> promise("the end");
  const Future<void> first = promise.future();
  promise.set_error(std::make_exception_ptr(DataError("test", "broken")));
  for (int i = 0; i < 3; ++i) {
    COHORT_EXPECT_THROW_WITH(Future<void>(first).get(patience()), DataError, "broken");
  }
}

TEST(FutureTest, RunApartReturnsWhatTheFunctionReturns) {
  Future<std::string> text = run_detached("a text", [] { return std::string("text"); });
  EXPECT_EQ(text.get(patience()), "text");
  Future<int> failed = run_detached("a number", []() -> int { throw DataError("test", "broken"); });
  COHORT_EXPECT_THROW_WITH(failed.get(patience()), DataError, "broken");
}

TEST(FutureTest, ACopyOfTheValueLeavesItThere) {
  Promise<std::string> promise("a text");
  Future<std::string> first = promise.future();
  const Future<std::string> second = first;
  COHORT_EXPECT_THROW_WITH(promise.future().copy(Deadline(1ms)), TimeoutError, "a text");
  promise.run([] { return std::string("text"); });
  EXPECT_EQ(first.copy(patience()), "text");
  EXPECT_EQ(second.copy(patience()), "text");
  EXPECT_EQ(first.get(patience()), "text");
  COHORT_EXPECT_THROW_WITH(second.copy(patience()), UsageError, "taken before");
}

TEST(FutureTest, AValueIsTakenOnce) {
  Promise<std::string> promise("a text");
  Future<std::string> first = promise.future(), second = first, none;
  promise.run([] { return std::string("text"); });
  EXPECT_EQ(first.get(patience()), "text");
  COHORT_EXPECT_THROW_WITH(first.get(patience()), UsageError, "taken before");
  COHORT_EXPECT_THROW_WITH(second.get(patience()), UsageError, "taken before");
  COHORT_EXPECT_THROW_WITH(none.ready(), UsageError, "not there");
}

TEST(FutureTest, CallbacksRunOnceItIsThere) {
  Promise<int> promise("a number");
  Future<int> future = promise.future();
  int before = 0, after = 0;
  future.on_ready([&] { before += future.ready() ? 1 : 100; });
  EXPECT_EQ(before, 0);
  promise.run([] { return 7; });
  EXPECT_EQ(before, 1);
  future.on_ready([&] { ++after; });
  EXPECT_EQ(after, 1) << "at once where it is there";
  EXPECT_EQ(future.get(patience()), 7);

  Future<void> lost = Promise<void>("lost").future();
  lost.on_ready([&] { ++after; });
  EXPECT_EQ(after, 2) << "for an error too";
}

// A helper that has always something to do must not keep the thread that waits.
TEST(FutureTest, AHelperIsToldOfTheDeadline) {
  const WaitHelper helper = [](const std::function<bool()>& is_done) {
    const Deadline limit(3s);
    while (!is_done() && !limit.expired()) sleep(1ms, limit);
  };
  Promise<int> promise("a number", helper);
  const Deadline limit(3s);
  EXPECT_FALSE(promise.future().wait(Deadline(10ms)));
  EXPECT_FALSE(limit.expired()) << "the helper did not come back";
}

// Results that are set while somebody begins to wait, gives up or looks.
TEST(FutureTest, ARandomScheduleLosesNoResult) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const auto delay = std::chrono::microseconds(random() % 60);
    const auto limit = std::chrono::microseconds(random() % 80);
    Promise<int> promise("a number");
    Future<int> future = promise.future(), copy = future;
    std::thread setter([promise = std::move(promise), delay, round]() mutable {
      for (const Deadline begin(delay); !begin.expired();) {  // a sleep would be longer than any limit here
      }
      promise.run([round] { return round; });
    });
    try {
      EXPECT_EQ(future.get(Deadline(limit)), round);
    } catch (const TimeoutError&) {
      EXPECT_EQ(copy.get(patience()), round);
    }
    setter.join();
  }
}

}  // namespace
}  // namespace cohort::base

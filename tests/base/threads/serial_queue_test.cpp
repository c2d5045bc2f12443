#include "cohort/base/threads/serial_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/timeline.h"
#include "tests/support/gate.h"
#include "tests/support/messages.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

using namespace std::chrono_literals;

using test::patience;

TEST(SerialQueueTest, RunsInOrderOnItsCoresAndReturnsValues) {
  const CpuSet last({CpuSet::of_process().ids().back()});
  SerialQueue thread({.name = "t", .cpus = last});
  std::vector<int> order;
  std::vector<Future<int>> pending;
  for (int i = 0; i < 100; ++i) {
    pending.push_back(thread.submit("number", [&order, i] {
      order.push_back(i);
      return i * i;
    }));
  }
  for (int i = 0; i < 100; ++i) EXPECT_EQ(pending[static_cast<std::size_t>(i)].get(patience()), i * i);
  std::vector<int> expected(100);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
  EXPECT_EQ(thread.submit("cores", [] { return CpuSet::of_current_thread(); }).get(patience()), last);
  EXPECT_TRUE(thread.submit("self", [&] { return thread.is_current(); }).get(patience()));
  EXPECT_FALSE(thread.is_current());
}

TEST(SerialQueueTest, TakesWhatCannotBeCopiedAndDropsItOnTheThread) {
  SerialQueue thread({.name = "t"});
  std::thread::id dropped;
  struct Note {
    std::thread::id* where;
    ~Note() { *where = std::this_thread::get_id(); }
  };
  auto note = std::make_unique<Note>(Note{&dropped});
  auto pending = thread.submit("move", [note = std::move(note)] { return std::make_unique<int>(7); });
  EXPECT_EQ(*pending.get(patience()), 7);
  EXPECT_EQ(dropped, thread.submit("id", [] { return std::this_thread::get_id(); }).get(patience()));
}

TEST(SerialQueueTest, ThrowsWhatTheFunctionThrewAndContinues) {
  SerialQueue thread({.name = "t"});
  auto bad = thread.submit("bad", []() -> int { throw DataError("test", "no"); });
  auto good = thread.submit("good", [] { return 1; });
  COHORT_EXPECT_THROW_WITH(bad.get(patience()), DataError, "[test] no");
  EXPECT_EQ(good.get(patience()), 1);
}

TEST(SerialQueueTest, StartRunsFirstAndItsErrorComesOutOfTheConstructor) {
  thread_local int mark = 0;
  SerialQueue thread({.name = "t", .start = [] { mark = 5; }});
  EXPECT_EQ(thread.submit("mark", [] { return mark; }).get(patience()), 5);
  COHORT_EXPECT_THROW_WITH(SerialQueue({.name = "t", .start = [] { throw DataError("test", "start"); }}),
                           DataError, "[test] start");
}

TEST(SerialQueueTest, AStartThatDoesNotEndIsATimeoutOfTheConstructor) {
  const auto gate = std::make_shared<test::Gate>();  // the thread is left behind
  const Deadline waited(50ms);
  COHORT_EXPECT_THROW_WITH(
      SerialQueue({.name = "cpu:9", .start = [gate] { gate->wait(); }, .start_time = 50ms}), TimeoutError,
      "ms for thread cpu:9 to begin");
  EXPECT_LT(waited.elapsed(), 4s);
  gate->open();
}

TEST(SerialQueueTest, ADeadlineThatPassesNamesTheThreadAndWhatItIsIn) {
  test::Gate entered, gate;
  SerialQueue thread({.name = "cpu:9"});
  auto first = thread.submit("first", [&] {
    entered.open();
    gate.wait();
  });
  entered.wait();
  auto second = thread.submit("second", [] {});
  EXPECT_FALSE(second.wait(Deadline(1ms)));
  EXPECT_FALSE(thread.is_late());
  COHORT_EXPECT_THROW_WITH(second.get(Deadline(1ms)), TimeoutError,
                           "for second on thread cpu:9, which is busy with first");
  EXPECT_TRUE(thread.is_late());
  gate.open();
  second.get(patience());
  EXPECT_FALSE(thread.is_late()) << "who has the result of a function sees that its thread is late no more";
  first.get(patience());
}

// Functions end in the order in which they were given, each when the test lets it.
TEST(SerialQueueTest, IsLateWhileAFunctionIsThatWasGivenUpWhateverElseEnds) {
  struct Given {
    std::shared_ptr<test::Gate> gate;
    Future<void> pending;
    bool is_abandoned = false;
  };
  std::mt19937 random(7);
  const CpuSet core({CpuSet::of_process().ids().front()});
  SerialQueue thread({.name = "t", .cpus = core});
  std::deque<Given> given;
  for (int step = 0; step < 4000; ++step) {
    const auto what = random() % 3;
    if (what == 0 && given.size() < 6) {
      const auto gate = std::make_shared<test::Gate>();
      given.push_back({gate, thread.submit("work", [gate] { gate->wait(); })});
    } else if (what == 1 && !given.empty()) {
      Given& any = given[random() % given.size()];
      any.pending.abandon();
      any.is_abandoned = true;
    } else if (!given.empty()) {
      given.front().gate->open();
      ASSERT_TRUE(given.front().pending.wait(patience()));
      given.pop_front();
    }
    const bool is_late = std::ranges::any_of(given, &Given::is_abandoned);
    ASSERT_EQ(thread.is_late(), is_late) << "step " << step;
  }
  for (const Given& each : given) {
    each.gate->open();
    ASSERT_TRUE(each.pending.wait(patience()));
  }
}

TEST(SerialQueueTest, IsStuckInAFunctionThatWasGivenUpAndNotInOneBeforeIt) {
  test::Gate entered, gate, entered_again, second_gate;
  SerialQueue thread({.name = "t"});
  auto first = thread.submit("first", [&] {
    entered.open();
    gate.wait();
  });
  auto second = thread.submit("second", [&] {
    entered_again.open();
    second_gate.wait();
  });
  entered.wait();
  EXPECT_TRUE(second.abandon());
  EXPECT_TRUE(thread.is_late());
  EXPECT_FALSE(thread.is_stuck()) << "the first one is waited for";
  EXPECT_TRUE(first.abandon());
  EXPECT_TRUE(thread.is_stuck());
  gate.open();
  ASSERT_TRUE(first.wait(patience()));
  entered_again.wait();
  EXPECT_TRUE(thread.is_stuck()) << "the second one runs";
  second_gate.open();
  ASSERT_TRUE(second.wait(patience()));
  EXPECT_FALSE(thread.is_stuck());
  EXPECT_FALSE(second.abandon()) << "it is done";
  EXPECT_FALSE(thread.is_stuck());
}

TEST(SerialQueueTest, IsStuckInAFunctionThatNobodyWaitsForOnceAnotherIsGivenUpAfterIt) {
  test::Gate entered, gate;
  SerialQueue thread({.name = "t"});
  // Its Future is gone at once, and cannot give it up.
  static_cast<void>(thread.submit("dropped", [&] {
    entered.open();
    gate.wait();
  }));
  entered.wait();
  EXPECT_FALSE(thread.is_stuck()) << "nobody has waited in vain";
  auto later = thread.submit("later", [] {});
  EXPECT_FALSE(thread.is_stuck());
  EXPECT_TRUE(later.abandon());
  EXPECT_TRUE(thread.is_stuck());
  gate.open();
  ASSERT_TRUE(later.wait(patience()));
  EXPECT_FALSE(thread.is_stuck());
}

TEST(SerialQueueTest, AWaiterLooksNoLongerThanItsDeadline) {
  const auto gate = std::make_shared<test::Gate>();
  SerialQueue thread({.name = "t", .spin = 60s});
  auto pending = thread.submit("work", [gate] { gate->wait(); });
  const Deadline deadline(1ms);
  EXPECT_FALSE(pending.wait(deadline));
  EXPECT_LT(deadline.elapsed(), 30s);
  gate->open();
  EXPECT_TRUE(pending.wait(patience()));
}

TEST(SerialQueueTest, AThreadThatIsStuckIsLeftBehindAndWhatWaitsForItFails) {
  auto gate = std::make_shared<test::Gate>();
  auto entered = std::make_shared<test::Gate>();
  SerialQueue thread({.name = "cpu:9"});
  auto first = thread.submit("first", [gate, entered] {
    entered->open();
    gate->wait();
    return 3;
  });
  auto second = thread.submit("second", [] {});
  entered->wait();
  EXPECT_FALSE(thread.stop(1ms));
  EXPECT_FALSE(thread.stop(1ms)) << "it has not ended since";
  COHORT_EXPECT_THROW_WITH(second.get(patience()), TimeoutError,
                           "second was not begun: thread cpu:9 was given up, as it is busy with first");
  COHORT_EXPECT_THROW_WITH(thread.submit("third", [] {}), UsageError, "has been stopped");
  gate->open();
  EXPECT_EQ(first.get(patience()), 3) << "what it was in ends all the same";
}

TEST(SerialQueueTest, AThreadThatIsLateHoldsUpNobodyWhoDestroysIt) {
  const auto gate = std::make_shared<test::Gate>();
  const Deadline waited(10ms);
  {
    SerialQueue thread({.name = "cpu:9"});
    auto stuck = thread.submit("stuck", [gate] { gate->wait(); });
    EXPECT_THROW(stuck.get(waited), TimeoutError);
  }
  EXPECT_LT(waited.elapsed(), 4s);
  gate->open();
}

// What is to be done now and then, between functions.
TEST(SerialQueueTest, RunsItsIdleFunctionWhileItHasNothingElse) {
  std::atomic<int> idle{0};
  SerialQueue queue({.name = "t", .idle = [&] { ++idle; }, .idle_time = 2ms});
  EXPECT_TRUE(poll_until([&] { return idle >= 3; }, patience()));
  const int seen = queue.submit("look", [&] { return idle.load(); }).get(patience());
  EXPECT_GE(seen, 3);
  EXPECT_TRUE(poll_until([&] { return idle > seen; }, patience()));
  EXPECT_TRUE(queue.stop(60s));
  const int last = idle;
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(idle, last);
}

TEST(SerialQueueTest, AnIdleFunctionThatThrowsRunsNoMoreAndTheOthersDo) {
  std::atomic<int> idle{0};
  std::string logged;
  set_log_sink([&](LogLevel, std::string_view line) { logged += line; });
  SerialQueue queue({.name = "t",
                     .idle =
                         [&] {
                           ++idle;
                           throw DataError("test", "broken");
                         },
                     .idle_time = 1ms});
  EXPECT_TRUE(poll_until([&] { return idle > 0; }, patience()));
  EXPECT_EQ(queue.submit("more", [] { return 1; }).get(patience()), 1);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(idle, 1);
  EXPECT_TRUE(queue.stop(60s));
  set_log_sink({});
  test::expect_in(logged, {"thread t", "runs no more", "broken"});
}

TEST(SerialQueueTest, StoppingRunsWhatWasGiven) {
  std::atomic<int> count{0};
  {
    SerialQueue thread({.name = "t"});
    for (int i = 0; i < 20; ++i) thread.submit("count", [&] { ++count; });
  }
  EXPECT_EQ(count, 20);
}

TEST(SerialQueueTest, CanBeDestroyedByItsOwnFunction) {
  auto thread = std::make_shared<SerialQueue>(SerialQueue::Options{.name = "t"});
  SerialQueue& reference = *thread;
  auto gate = std::make_shared<test::Gate>();
  auto pending = reference.submit("last", [gate, thread = std::move(thread)] {
    gate->wait();
    return 1;
  });
  gate->open();
  EXPECT_EQ(pending.get(patience()), 1);
}

// The function may end, and the thread go, before submit() has returned.
TEST(SerialQueueTest, CanBeDestroyedByItsOwnFunctionAtOnce) {
  for (int round = 0; round < 200; ++round) {
    auto thread = std::make_shared<SerialQueue>(SerialQueue::Options{.name = "t"});
    SerialQueue& reference = *thread;
    auto pending = reference.submit("last", [thread = std::move(thread)] { return 1; });
    ASSERT_EQ(pending.get(patience()), 1);
  }
}

TEST(SerialQueueTest, WaitsInACircleAreRejected) {
  SerialQueue a({.name = "a"}), b({.name = "b"});
  auto itself = a.submit("outer", [&] { a.submit("inner", [] {}).get(patience()); });
  COHORT_EXPECT_THROW_WITH(itself.get(patience()), UsageError,
                           "thread a, busy with outer, would wait for inner on thread a, which is itself");
  auto circle = a.submit("outer", [&] {
    b.submit("middle", [&] { a.submit("inner", [] {}).get(patience()); }).get(patience());
  });
  // Whichever of the two comes to wait last is rejected.
  COHORT_EXPECT_THROW_WITH(circle.get(patience()), UsageError, "which waits for it in turn");
  auto chain = a.submit("outer", [&] { return b.submit("middle", [] { return 2; }).get(patience()); });
  EXPECT_EQ(chain.get(patience()), 2);
  SerialQueue c({.name = "c"});
  const auto ask = [](SerialQueue& next, auto fn) { next.submit("inner", fn).get(patience()); };
  auto of_three = a.submit("outer", [&] { ask(b, [&] { ask(c, [&] { ask(a, [] {}); }); }); });
  COHORT_EXPECT_THROW_WITH(of_three.get(patience()), UsageError, "which waits for it in turn");
}

TEST(SerialQueueTest, ALookWithoutWaitingIsNoPartOfACircle) {
  SerialQueue a({.name = "a"}), b({.name = "b"});
  const auto outer = a.submit("outer", [&] {
    auto inner = a.submit("inner", [] {});
    return b.submit("look", [&] { return inner.wait(Deadline(0ms)); }).get(patience());
  });
  EXPECT_FALSE(Future(outer).get(patience()));
}

// The thread that waited is yet to wake when what it waited for is done: it waits no more. The work ends at
// another moment of the wait in each round.
TEST(SerialQueueTest, AWaitThatIsOverIsNoPartOfACircle) {
  SerialQueue a({.name = "a"}), b({.name = "b", .spin = 0us});
  for (int round = 0; round < 2000; ++round) {
    auto inner = a.submit("inner", [round] {
      const Deadline end(std::chrono::nanoseconds(round % 200 * 200));
      while (!end.expired()) {
      }
    });
    auto first = b.submit("middle", [&] { inner.get(patience()); });
    auto second = a.submit("outer", [&] { return b.submit("next", [] { return 2; }).get(patience()); });
    ASSERT_EQ(second.get(patience()), 2) << round;
    first.get(patience());
  }
}

TEST(SerialQueueTest, KnowsWhenItSharesCores) {
  const int core = CpuSet::of_process().ids().front();
  SerialQueue first({.name = "first", .cpus = CpuSet({core})});
  EXPECT_FALSE(first.shares_cores());
  {
    SerialQueue second({.name = "second", .cpus = CpuSet({core})});
    EXPECT_TRUE(first.shares_cores());
    EXPECT_TRUE(second.shares_cores());
    EXPECT_EQ(second.submit("work", [] { return 1; }).get(patience()), 1);
  }
  EXPECT_FALSE(first.shares_cores());
}

TEST(SerialQueueTest, StandsInTheTimelineByName) {
  Timeline::start();
  SerialQueue thread({.name = "cpu:0/timeline"});
  thread.submit("a piece of work", [] {}).get(patience());
  Timeline::stop();
  const std::string trace = Timeline::json();
  EXPECT_NE(trace.find("cpu:0/timeline"), std::string::npos);
  EXPECT_NE(trace.find("a piece of work"), std::string::npos);
}

TEST(SerialQueueTest, LeavesNothingInTheTimelineWhereItIsNotToStandThere) {
  Timeline::start();
  SerialQueue thread({.name = "unseen thread", .in_timeline = false});
  thread.submit("unseen work", [] {}).get(patience());
  Timeline::stop();
  EXPECT_EQ(Timeline::json().find("unseen"), std::string::npos);
}

TEST(SerialQueueTest, ManyCallersGiveWorkAtOnce) {
  SerialQueue thread({.name = "t"});
  std::int64_t sum = 0;  // only the thread touches it
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 300; ++i) thread.submit("add", [&] { ++sum; }).get(patience());
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(thread.submit("sum", [&] { return sum; }).get(patience()), 900);
}

}  // namespace
}  // namespace cohort::base

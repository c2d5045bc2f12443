#include "cohort/base/threads/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

using namespace std::chrono_literals;

using test::patience;

TEST(ThreadPoolTest, RunsAsManyAtATimeAsItMay) {
  std::atomic<int> running{0}, most{0}, started{0};
  ThreadPool pool({.name = "t", .max_threads = 2, .start = [&] { ++started; }});
  std::vector<Future<int>> futures;
  for (int i = 0; i < 40; ++i) {
    futures.push_back(pool.submit("number", [&, i] {
      const int now = ++running;
      for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
      }
      std::this_thread::sleep_for(1ms);
      --running;
      return i;
    }));
  }
  for (int i = 0; i < 40; ++i) EXPECT_EQ(futures[static_cast<std::size_t>(i)].get(patience()), i);
  EXPECT_EQ(most, 2);
  EXPECT_EQ(started, 2);
}

// Functions that wait for functions of the same pool: each gives its place to the next.
TEST(ThreadPoolTest, FunctionsThatWaitForOthersOfThePoolDoNotUseItUp) {
  ThreadPool pool({.name = "t", .max_threads = 2});
  std::function<int(int)> depth = [&](int left) {
    if (left == 0) return 0;
    Future<int> below = pool.submit("below", [&, left] { return depth(left - 1); });
    const ThreadPool::Waiting waiting;
    return below.get(patience()) + 1;
  };
  EXPECT_EQ(pool.submit("top", [&] { return depth(20); }).get(patience()), 20);

  // Of the threads that this made two run at a time.
  std::atomic<int> running{0}, most{0};
  std::vector<Future<void>> futures;
  for (int i = 0; i < 40; ++i) {
    futures.push_back(pool.submit("count", [&] {
      const int now = ++running;
      for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
      }
      std::this_thread::sleep_for(1ms);
      --running;
    }));
  }
  for (Future<void>& future : futures) future.get(patience());
  EXPECT_EQ(most, 2);
  const ThreadPool::Waiting outside;  // on a thread of no pool
}

// A thread that is above the limit, since a function waited once, takes the place of one that is stuck.
TEST(ThreadPoolTest, AThreadAboveTheLimitTakesThePlaceOfOneThatIsStuck) {
  test::Gate gate;  // the pool's threads use them until the pool is gone
  std::atomic<bool> is_stuck{false};
  ThreadPool pool({.name = "t", .max_threads = 1});
  pool.submit("outer",
              [&] {
                Future<void> inner = pool.submit("inner", [] {});
                const ThreadPool::Waiting waiting;
                inner.get(patience());
              })
      .get(patience());
  Future<void> stuck = pool.submit("stuck", [&] {
    is_stuck = true;
    gate.wait();
  });
  while (!is_stuck) std::this_thread::sleep_for(1ms);
  Future<void> next = pool.submit("next", [] {});
  EXPECT_THROW(stuck.get(Deadline(20ms)), TimeoutError);
  EXPECT_NO_THROW(next.get(Deadline(20s))) << "the gate opens itself after a minute";
  gate.open();
}

// What wakes an idle thread must not wake stop() in its place.
TEST(ThreadPoolTest, AFunctionThatBeginsToWaitWhileThePoolIsStoppedGivesItsPlaceAway) {
  test::Gate entered, gate;
  ThreadPool pool({.name = "t", .max_threads = 1});
  pool.submit("first",
              [&] {
                Future<void> inner = pool.submit("inner", [] {});
                const ThreadPool::Waiting waiting;  // makes a thread above the limit, which stays
                inner.get(patience());
              })
      .get(patience());
  Future<int> outer = pool.submit("outer", [&] {
    Future<int> inner = pool.submit("inner", [] { return 3; });
    entered.open();
    gate.wait();
    const ThreadPool::Waiting waiting;
    return inner.get(Deadline(2s));
  });
  entered.wait();
  std::thread stops([&] { EXPECT_EQ(pool.stop(60s), 0); });
  std::this_thread::sleep_for(100ms);  // it waits by now
  gate.open();
  EXPECT_NO_THROW(EXPECT_EQ(outer.get(patience()), 3));
  stops.join();
}

TEST(ThreadPoolTest, MakesNoThreadWhereOneIsIdle) {
  std::set<std::thread::id> ids;
  ThreadPool pool({.name = "t", .max_threads = 8});
  for (int i = 0; i < 20; ++i) {
    ids.insert(pool.submit("id", [] { return std::this_thread::get_id(); }).get(patience()));
    std::this_thread::sleep_for(2ms);  // it comes back for more
  }
  EXPECT_LE(ids.size(), 2U);  // slow machines: it may not have come back in time
}

TEST(ThreadPoolTest, BeginsThemInOrderAndDropsThemOnTheThread) {
  ThreadPool pool({.name = "t", .max_threads = 1});
  std::vector<int> order;
  struct Note {
    std::thread::id* where;
    ~Note() { *where = std::this_thread::get_id(); }
  };
  std::thread::id dropped;
  auto note = std::make_unique<Note>(Note{&dropped});
  std::vector<Future<void>> futures;
  for (int i = 0; i < 20; ++i) futures.push_back(pool.submit("order", [&, i] { order.push_back(i); }));
  auto id = pool.submit("id", [note = std::move(note)] { return std::this_thread::get_id(); });
  EXPECT_EQ(id.get(patience()), dropped);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(order.size(), 20U);
}

TEST(ThreadPoolTest, ThrowsWhatTheFunctionThrew) {
  ThreadPool pool({.name = "t"});
  auto failed = pool.submit("fail", []() -> int { throw DataError("test", "broken"); });
  COHORT_EXPECT_THROW_WITH(failed.get(patience()), DataError, "broken");
  EXPECT_EQ(pool.submit("more", [] { return 1; }).get(patience()), 1);
}

// All threads are stuck, and the pool continues: as often as somebody gives one up.
TEST(ThreadPoolTest, AnotherThreadTakesThePlaceOfOneThatIsStuck) {
  auto gate = std::make_shared<test::Gate>();
  ThreadPool pool({.name = "t", .max_threads = 1});
  std::vector<Future<void>> stuck;
  for (int i = 0; i < 3; ++i) {
    auto future = pool.submit("stuck", [gate] { gate->wait(); });
    stuck.push_back(future);
    auto later = pool.submit("later", [] {});
    COHORT_EXPECT_THROW_WITH(future.get(Deadline(20ms)), TimeoutError, "stuck in the thread pool t");
    EXPECT_NO_THROW(later.get(patience()));
  }
  gate->open();
  for (auto& each : stuck) EXPECT_TRUE(each.wait(patience()));
  // Those that were stuck have ended: one at a time again.
  std::atomic<int> running{0};
  std::atomic<bool> together{false};
  std::vector<Future<void>> futures;
  for (int i = 0; i < 20; ++i) {
    futures.push_back(pool.submit("one", [&] {
      if (++running > 1) together = true;
      std::this_thread::sleep_for(1ms);
      --running;
    }));
  }
  for (auto& each : futures) each.get(patience());
  EXPECT_FALSE(together);
}

// A server that is late is not to get a thread for each of those who gave up.
TEST(ThreadPoolTest, OneThatWasGivenUpBeforeItBeganDoesNotRun) {
  auto gate = std::make_shared<test::Gate>();
  std::atomic<int> ran{0};
  ThreadPool pool({.name = "t", .max_threads = 1});
  auto first = pool.submit("first", [gate] { gate->wait(); });
  std::vector<Future<void>> futures;
  for (int i = 0; i < 50; ++i) {
    futures.push_back(pool.submit("other", [&] { ++ran; }));
    EXPECT_TRUE(futures.back().abandon());
  }
  gate->open();
  first.get(patience());
  for (auto& future : futures) {
    COHORT_EXPECT_THROW_WITH(future.get(patience()), TimeoutError, "was given up before it began");
  }
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(pool.submit("more", [] { return 3; }).get(patience()), 3);
}

TEST(ThreadPoolTest, APoolWithoutThreadsIsRejected) {
  COHORT_EXPECT_THROW_WITH(ThreadPool({.name = "t", .max_threads = 0}), UsageError, "expected at least 1");
}

TEST(ThreadPoolTest, StoppingRunsWhatWasGivenAndRejectsMore) {
  std::atomic<int> ran{0};
  ThreadPool pool({.name = "t", .max_threads = 2});
  for (int i = 0; i < 50; ++i) pool.submit("count", [&] { ++ran; });
  EXPECT_EQ(pool.stop(60s), 0);
  EXPECT_EQ(ran, 50);
  COHORT_EXPECT_THROW_WITH(pool.submit("more", [] {}), UsageError, "has been stopped");
  EXPECT_EQ(pool.stop(60s), 0);
}

TEST(ThreadPoolTest, OneThatIsStuckIsLeftBehindAndWhatWaitsFails) {
  auto entered = std::make_shared<test::Gate>(), gate = std::make_shared<test::Gate>();
  Future<void> stuck;
  const Deadline end(4s);
  {
    ThreadPool pool({.name = "t", .max_threads = 1});
    stuck = pool.submit("stuck", [entered, gate] {
      entered->open();
      gate->wait();
    });
    auto later = pool.submit("later", [] {});
    entered->wait();
    EXPECT_EQ(pool.stop(10ms), 1);
    COHORT_EXPECT_THROW_WITH(later.get(patience()), TimeoutError, "later was not begun");
  }
  EXPECT_FALSE(end.expired()) << "it was waited for a second time";
  gate->open();
  stuck.get(patience());
}

TEST(ThreadPoolTest, CanBeDestroyedByWhatAFunctionHolds) {
  auto pool = std::make_shared<ThreadPool>(ThreadPool::Options{.name = "t"});
  ThreadPool& reference = *pool;
  auto future = reference.submit("last", [pool = std::move(pool)] { return 5; });
  EXPECT_EQ(future.get(patience()), 5);
}

TEST(ThreadPoolTest, CanBeDestroyedByItsOwnFunction) {
  auto pool = std::make_shared<ThreadPool>(ThreadPool::Options{.name = "t"});
  ThreadPool& reference = *pool;
  auto future = reference.submit("last", [pool = std::move(pool)]() mutable {
    pool.reset();
    return 5;
  });
  EXPECT_EQ(future.get(patience()), 5);
}

// Counts threads that have run a function of the pool, and live.
std::atomic<int> num_pool_threads{0};
struct CountsThread {
  CountsThread() { ++num_pool_threads; }
  ~CountsThread() { --num_pool_threads; }
};
void count_thread() {
  thread_local const CountsThread counts;
  static_cast<void>(counts);
}

// A pool of eight threads has all of them afterwards, idle.
void start_all_threads(ThreadPool& pool) {
  test::Gate gate;
  std::vector<Future<void>> futures;
  for (int i = 0; i < 8; ++i) {
    futures.push_back(pool.submit("wait", [&] {
      count_thread();
      gate.wait();
    }));
  }
  EXPECT_TRUE(test::comes_true([] { return num_pool_threads == 8; }));
  gate.open();
  for (Future<void>& future : futures) future.get(patience());
}

TEST(ThreadPoolTest, ThreadsThatItCanDoWithoutEnd) {
  ASSERT_TRUE(test::comes_true([] { return num_pool_threads == 0; }));
  ThreadPool pool({.name = "t", .max_threads = 8, .idle_time = 20ms, .num_kept = 2});
  for (int round = 0; round < 2; ++round) {
    start_all_threads(pool);
    EXPECT_TRUE(test::comes_true([] { return num_pool_threads <= 2; })) << num_pool_threads;
    std::this_thread::sleep_for(100ms);
    EXPECT_EQ(num_pool_threads, 2);
  }
  EXPECT_EQ(pool.stop(60s), 0);
  EXPECT_EQ(num_pool_threads, 0);
}

// One function at a time needs one thread, though all that are idle take turns.
TEST(ThreadPoolTest, ThreadsThatTakeTurnsUnderASmallLoadEndToo) {
  ThreadPool pool({.name = "t", .max_threads = 8, .idle_time = 50ms, .num_kept = 1});
  start_all_threads(pool);
  EXPECT_TRUE(test::comes_true([&] {
    pool.submit("short", count_thread).get(patience());
    return num_pool_threads <= 2;
  }));
}

// Random functions: short, long, failing, given up before they began or while they run, with a stop at any
// time.
TEST(ThreadPoolTest, ARandomScheduleLosesNothingAndKeepsItsLimit) {
  std::mt19937 random(7);
  for (int round = 0; round < 40; ++round) {
    std::atomic<int> ran{0}, running{0}, given_up{0}, too_many{0};
    const int threads = 1 + static_cast<int>(random() % 3);
    ThreadPool pool({.name = "t", .max_threads = threads, .idle_time = std::chrono::milliseconds(round % 2)});
    std::vector<Future<int>> futures;
    constexpr int kFunctions = 60;
    const int stops_after = static_cast<int>(random() % (2 * kFunctions));
    int given = 0;
    for (; given < kFunctions && given != stops_after; ++given) {
      const auto time = std::chrono::microseconds(random() % 300);
      const bool fails = random() % 5 == 0;
      futures.push_back(pool.submit("random", [&, time, fails, i = given] {
        if (++running > threads + given_up) ++too_many;
        std::this_thread::sleep_for(time);
        --running;
        ++ran;
        if (fails) throw DataError("test", "broken");
        return i;
      }));
      if (random() % 8 == 0) std::this_thread::sleep_for(2ms);  // threads may end
      if (random() % 4 == 0) {
        ++given_up;  // one that runs has a successor
        futures.back().abandon();
      }
    }
    EXPECT_EQ(pool.stop(60s), 0);
    int ended = 0;
    for (int i = 0; i < given; ++i) {
      Future<int>& future = futures[static_cast<std::size_t>(i)];
      ASSERT_TRUE(future.ready());
      try {
        EXPECT_EQ(future.get(patience()), i);
        ++ended;
      } catch (const DataError&) {
        ++ended;
      } catch (const TimeoutError&) {  // given up before it began
      }
    }
    EXPECT_EQ(ran, ended);
    EXPECT_GE(ran, given - given_up);
    EXPECT_EQ(too_many, 0);
  }
}

}  // namespace
}  // namespace cohort::base

#include "cohort/data/internal/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "cohort/data/encoded_cache.h"
#include "cohort/data/internal/parallel.h"
#include "tests/support/gate.h"

namespace cohort::data {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(WorkerPoolTest, DoesEachItemOnceAndInTime) {
  for (const int workers : {1, 2, 8}) {
    // Plain integers on purpose: a race on them is a race in the pool.
    std::vector<std::vector<int>> done(3, std::vector<int>(50));
    WorkerPool pool({workers, 3, 50, 7}, [&](int, std::int64_t job, std::int64_t item) {
      ++done[static_cast<std::size_t>(job % 3)][static_cast<std::size_t>(item)];
    });
    std::int64_t next = 0;
    for (std::int64_t job = 0; job < 300; ++job) {
      while (pool.published() - next < 3) pool.publish(pool.published() % 5 == 4 ? 13 : 50);
      ASSERT_TRUE(pool.wait(next, base::Deadline(seconds(60))));
      auto& slot = done[static_cast<std::size_t>(next % 3)];
      EXPECT_EQ(std::accumulate(slot.begin(), slot.end(), 0), next % 5 == 4 ? 13 : 50);
      std::ranges::fill(slot, 0);
      ++next;
    }
  }
}

TEST(WorkerPoolTest, CancelledJobsAreDoneSoon) {
  std::atomic<int> calls{0};
  test::Gate cancelled;
  WorkerPool pool({2, 2, 1000, 1}, [&](int, std::int64_t, std::int64_t) {
    ++calls;
    cancelled.wait();
  });
  pool.publish(1000);
  pool.publish(1000);
  pool.cancel();
  cancelled.open();
  EXPECT_TRUE(pool.wait(0, base::Deadline(seconds(60))));
  EXPECT_TRUE(pool.wait(1, base::Deadline(seconds(60))));
  EXPECT_LE(calls.load(), 2) << "what each worker had begun";
  calls = 0;
  pool.publish(10);  // later jobs are done as usual
  EXPECT_TRUE(pool.wait(2, base::Deadline(seconds(60))));
  EXPECT_EQ(calls.load(), 10);
}

TEST(WorkerPoolTest, NamesWhatAWorkerIsBusyWithAndLeavesItBehind) {
  auto release = std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> inside{false};
  // One worker: an idle one may take longer than the patience to end.
  WorkerPool pool({1, 1, 4, 1}, [release, &inside](int, std::int64_t, std::int64_t item) {
    if (item != 3) return;
    inside = true;
    while (!*release) std::this_thread::sleep_for(milliseconds(1));
  });
  EXPECT_FALSE(pool.longest().has_value());
  pool.publish(4);
  EXPECT_FALSE(pool.wait(0, base::Deadline(milliseconds(20))));
  while (!inside) std::this_thread::yield();
  ASSERT_TRUE(pool.longest().has_value());
  EXPECT_EQ(pool.longest()->item, 3);
  EXPECT_GE(pool.longest()->since.count(), 0);
  EXPECT_EQ(pool.stop(milliseconds(10)), 1);
  *release = true;
  std::this_thread::sleep_for(milliseconds(50));
}

TEST(WorkerPoolTest, StopsAnIdlePoolAtOnce) {
  for (int i = 0; i < 50; ++i) {
    WorkerPool pool({4, 2, 8, 2}, [](int, std::int64_t, std::int64_t) {});
    if (i % 2 == 0) pool.publish(8);
    EXPECT_EQ(pool.stop(seconds(60)), 0);
  }
}

TEST(ForEachItemTest, ThrowsTheLowestErrorOn) {
  std::vector<std::atomic<int>> seen(1000);
  for_each_item(1000, 4, [&](int, std::int64_t item) { ++seen[static_cast<std::size_t>(item)]; });
  EXPECT_TRUE(std::ranges::all_of(seen, [](const auto& count) { return count == 1; }));
  EXPECT_THROW(for_each_item(100, 3,
                             [](int, std::int64_t item) {
                               if (item == 40) throw std::runtime_error("forty");
                             }),
               std::runtime_error);
}

TEST(EncodedCacheTest, IsFilledByManyThreads) {
  EncodedCache cache(200, 20000);
  for_each_item(2000, 4, [&](int, std::int64_t item) {
    const std::int64_t file = item % 200;
    const std::string content(50, static_cast<char>('a' + file % 26));
    if (const auto bytes = cache.find(file)) {
      EXPECT_EQ(std::to_integer<char>((*bytes)[49]), content[49]);
    } else {
      cache.store(file, std::as_bytes(std::span(content)));
    }
  });
  EXPECT_LE(cache.bytes_used(), 20000);
}

}  // namespace
}  // namespace cohort::data

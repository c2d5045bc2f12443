#include "cohort/core/parallel.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/support/throws.h"

namespace cohort::core {
namespace {

class ParallelTest : public testing::Test {
 protected:
  void TearDown() override { at::set_num_threads(1); }
};

TEST_F(ParallelTest, EveryItemOnceInStretchesThatDoNotDependOnThreads) {
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    std::vector<int> times(1003, 0);
    std::atomic<int> odd{0};
    parallel_for(1003, 10, [&](std::int64_t begin, std::int64_t end) {
      if (begin % 10 != 0 || end != std::min<std::int64_t>(begin + 10, 1003)) ++odd;
      for (std::int64_t i = begin; i < end; ++i) ++times[static_cast<std::size_t>(i)];
    });
    EXPECT_EQ(times, std::vector<int>(1003, 1));
    EXPECT_EQ(odd.load(), 0);
  }
  parallel_for(0, 10, [](std::int64_t, std::int64_t) { FAIL() << "there was nothing to do"; });
}

// Returns on how many threads a loop of two items runs, where each item waits for the other to begin.
std::size_t threads_used(std::chrono::milliseconds patience) {
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::atomic<int> begun{0};
  parallel_for(2, 1, [&](std::int64_t, std::int64_t) {
    ++begun;
    const auto give_up = std::chrono::steady_clock::now() + patience;
    while (begun.load() < 2 && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
    const std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  return seen.size();
}

TEST_F(ParallelTest, RunsOnAsManyThreadsAsLibTorchComputesWith) {
  at::set_num_threads(1);
  EXPECT_EQ(threads_used(std::chrono::milliseconds(200)), 1U);
  at::set_num_threads(2);
  EXPECT_EQ(threads_used(std::chrono::seconds(20)), 2U);
}

TEST_F(ParallelTest, ALoopInsideALoopRunsOnItsThread) {
  at::set_num_threads(2);
  std::atomic<int> strangers{0};
  parallel_for(4, 1, [&](std::int64_t, std::int64_t) {
    const auto self = std::this_thread::get_id();
    parallel_for(4, 1, [&](std::int64_t, std::int64_t) { strangers += std::this_thread::get_id() != self; });
  });
  EXPECT_EQ(strangers.load(), 0);
}

TEST_F(ParallelTest, ThrowsWhatTheLowestStretchThrewAfterAllHaveRun) {
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    std::atomic<int> run{0};
    const auto loop = [&] {
      parallel_for(64, 1, [&](std::int64_t begin, std::int64_t) {
        ++run;
        if (begin == 60 || begin == 5) throw std::runtime_error("item " + std::to_string(begin) + ".");
      });
    };
    COHORT_EXPECT_THROW_WITH(loop(), std::runtime_error, "item 5.");
    EXPECT_EQ(run.load(), 64);
  }
}

}  // namespace
}  // namespace cohort::core

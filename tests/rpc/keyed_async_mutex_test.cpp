// Which function begins when, without an agent.
#include "cohort/rpc/internal/keyed_async_mutex.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::rpc {
namespace {

using LockPointer = std::shared_ptr<KeyedAsyncMutex::Lock>;

class KeyedAsyncMutexTest : public testing::Test {
 protected:
  // Locks this channel until unlock().
  void lock(const std::string& channel) {
    const std::size_t index = locks_.size();
    locks_.emplace_back();
    mutex->lock({"w0", channel}, [this, index, channel](LockPointer lock) {
      begun += channel;
      locks_[index] = std::move(lock);
    });
  }
  void unlock(std::size_t index) { locks_.at(index)->unlock(); }

  const std::shared_ptr<KeyedAsyncMutex> mutex = std::make_shared<KeyedAsyncMutex>();
  std::string begun;  // the channels whose functions have begun

 private:
  std::vector<LockPointer> locks_;
};

TEST_F(KeyedAsyncMutexTest, EachBeginsOnceTheOneBeforeHasUnlocked) {
  lock("a");
  lock("a");
  lock("b");
  lock("a");
  EXPECT_EQ(begun, "ab");
  unlock(2);
  EXPECT_EQ(begun, "ab") << "another channel's";
  unlock(0);
  EXPECT_EQ(begun, "aba");
  unlock(0);
  EXPECT_EQ(begun, "aba") << "it unlocks once";
  unlock(1);
  EXPECT_EQ(begun, "abaa");
  EXPECT_EQ(mutex->num_keys(), 1U);
  unlock(3);
  EXPECT_EQ(mutex->num_keys(), 0U) << "an idle channel takes no memory";
}

TEST_F(KeyedAsyncMutexTest, TheLastHolderReleasesALock) {
  std::vector<int> order;
  LockPointer kept;
  mutex->lock({"w0", "a"}, [&](LockPointer lock) {
    order.push_back(1);
    kept = std::move(lock);
  });
  mutex->lock({"w0", "a"}, [&](const LockPointer&) { order.push_back(2); });
  mutex->lock({"w0", "a"}, [&](const LockPointer&) { order.push_back(3); });
  EXPECT_EQ(order, (std::vector<int>{1}));
  kept.reset();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(mutex->num_keys(), 0U);
}

// Each within the one before would need a stack of its own.
TEST_F(KeyedAsyncMutexTest, ManyThatUnlockAtOnceNeedNoStack) {
  lock("a");
  int num_begun = 0;
  std::uintptr_t lowest = UINTPTR_MAX, highest = 0;
  for (int i = 0; i < 100'000; ++i) {
    mutex->lock({"w0", "a"}, [&](const LockPointer& lock) {
      const auto frame = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
      lowest = std::min(lowest, frame);
      highest = std::max(highest, frame);
      ++num_begun;
      lock->unlock();
    });
  }
  unlock(0);
  EXPECT_EQ(num_begun, 100'000);
  EXPECT_LT(highest - lowest, 100'000U);
}

TEST_F(KeyedAsyncMutexTest, AFunctionMayLockItsOwnChannelOnceMore) {
  std::vector<int> order;
  mutex->lock({"w0", "a"}, [&](const LockPointer& lock) {
    mutex->lock({"w0", "a"}, [&](const LockPointer&) { order.push_back(2); });
    order.push_back(1);
    lock->unlock();
  });
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST_F(KeyedAsyncMutexTest, WhatWaitsIsDropped) {
  lock("a");
  lock("a");
  const auto held = std::make_shared<int>(1);
  mutex->lock({"w0", "a"}, [held](const LockPointer&) {});
  mutex->clear();
  EXPECT_EQ(held.use_count(), 1);
  mutex->lock({"w0", "b"}, [held](const LockPointer&) {});
  EXPECT_EQ(held.use_count(), 1) << "also what comes later";
  unlock(0);
  EXPECT_EQ(begun, "a");
  EXPECT_EQ(mutex->num_keys(), 0U);
}

TEST_F(KeyedAsyncMutexTest, ThreadsKeepTheOrderOfEachAndRunOneAtATime) {
  constexpr int kThreads = 3, kFunctions = 2'000;
  std::vector<std::pair<int, int>> order;  // no std::mutex: one function holds the lock at a time
  {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = 0; i < kFunctions; ++i) {
          mutex->lock({"w0", "a"}, [&order, thread, i](const LockPointer& lock) {
            order.emplace_back(thread, i);
            if (i % 2 == 0) lock->unlock();
          });
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  ASSERT_EQ(order.size(), std::size_t{kThreads} * kFunctions);
  std::vector<int> next(kThreads);
  for (const auto& [thread, i] : order) EXPECT_EQ(i, next[static_cast<std::size_t>(thread)]++);
  EXPECT_EQ(mutex->num_keys(), 0U);
}

}  // namespace
}  // namespace cohort::rpc

// Who begins when, without an agent.
#include "cohort/base/threads/turns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::base {
namespace {

using TurnPointer = std::shared_ptr<Turns::Turn>;

class TurnsTest : public testing::Test {
 protected:
  // Takes a turn of this channel, which lasts until end().
  void take(const std::string& channel) {
    const std::size_t index = turns_.size();
    turns_.emplace_back();
    turns->take({"w0", channel}, [this, index, channel](TurnPointer turn) {
      begun += channel;
      turns_[index] = std::move(turn);
    });
  }
  void end(std::size_t index) { turns_.at(index)->end(); }

  const std::shared_ptr<Turns> turns = std::make_shared<Turns>();
  std::string begun;  // the channels whose functions have begun

 private:
  std::vector<TurnPointer> turns_;
};

TEST_F(TurnsTest, EachBeginsOnceTheOneBeforeHasEnded) {
  take("a");
  take("a");
  take("b");
  take("a");
  EXPECT_EQ(begun, "ab");
  end(2);
  EXPECT_EQ(begun, "ab") << "another channel's";
  end(0);
  EXPECT_EQ(begun, "aba");
  end(0);
  EXPECT_EQ(begun, "aba") << "it ends once";
  end(1);
  EXPECT_EQ(begun, "abaa");
  EXPECT_EQ(turns->num_keys(), 1U);
  end(3);
  EXPECT_EQ(turns->num_keys(), 0U) << "an idle channel takes no memory";
}

TEST_F(TurnsTest, ATurnEndsWithItsLastHolder) {
  std::vector<int> order;
  TurnPointer kept;
  turns->take({"w0", "a"}, [&](TurnPointer turn) {
    order.push_back(1);
    kept = std::move(turn);
  });
  turns->take({"w0", "a"}, [&](const TurnPointer&) { order.push_back(2); });
  turns->take({"w0", "a"}, [&](const TurnPointer&) { order.push_back(3); });
  EXPECT_EQ(order, (std::vector<int>{1}));
  kept.reset();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(turns->num_keys(), 0U);
}

// Each within the one before would need a stack of its own.
TEST_F(TurnsTest, ManyThatEndAtOnceNeedNoStack) {
  take("a");
  int num_begun = 0;
  std::uintptr_t lowest = UINTPTR_MAX, highest = 0;
  for (int i = 0; i < 100'000; ++i) {
    turns->take({"w0", "a"}, [&](const TurnPointer& turn) {
      const auto frame = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
      lowest = std::min(lowest, frame);
      highest = std::max(highest, frame);
      ++num_begun;
      turn->end();
    });
  }
  end(0);
  EXPECT_EQ(num_begun, 100'000);
  EXPECT_LT(highest - lowest, 100'000U);
}

TEST_F(TurnsTest, AFunctionMayTakeATurnOfItsOwnChannel) {
  std::vector<int> order;
  turns->take({"w0", "a"}, [&](const TurnPointer& turn) {
    turns->take({"w0", "a"}, [&](const TurnPointer&) { order.push_back(2); });
    order.push_back(1);
    turn->end();
  });
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST_F(TurnsTest, WhatWaitsIsDropped) {
  take("a");
  take("a");
  const auto held = std::make_shared<int>(1);
  turns->take({"w0", "a"}, [held](const TurnPointer&) {});
  turns->clear();
  EXPECT_EQ(held.use_count(), 1);
  turns->take({"w0", "b"}, [held](const TurnPointer&) {});
  EXPECT_EQ(held.use_count(), 1) << "also what comes later";
  end(0);
  EXPECT_EQ(begun, "a");
  EXPECT_EQ(turns->num_keys(), 0U);
}

TEST_F(TurnsTest, ThreadsKeepTheOrderOfEachAndRunOneAtATime) {
  constexpr int kThreads = 3, kTurns = 2'000;
  std::vector<std::pair<int, int>> order;  // no mutex: there is one turn at a time
  {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = 0; i < kTurns; ++i) {
          turns->take({"w0", "a"}, [&order, thread, i](const TurnPointer& turn) {
            order.emplace_back(thread, i);
            if (i % 2 == 0) turn->end();
          });
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  ASSERT_EQ(order.size(), std::size_t{kThreads} * kTurns);
  std::vector<int> next(kThreads);
  for (const auto& [thread, i] : order) EXPECT_EQ(i, next[static_cast<std::size_t>(thread)]++);
  EXPECT_EQ(turns->num_keys(), 0U);
}

}  // namespace
}  // namespace cohort::base

#include "cohort/rpc/internal/agent/running_calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <set>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

namespace cohort::rpc {
namespace {

using Keys = std::vector<RunningCalls::Key>;

RunningCalls::RunningCall kept_call() {
  RunningCalls::RunningCall call;
  call.is_kept = true;
  return call;
}

TEST(RunningCallsTest, ACallRunsUntilItIsTaken) {
  RunningCalls calls;
  RunningCalls::RunningCall call;
  const std::stop_token token = call.stop.get_token();
  calls.add({"w1", 7}, std::move(call));
  EXPECT_FALSE(calls.is_idle());
  EXPECT_EQ(calls.describe(), (std::vector<std::string>{"the handler of call 7 of w1"}));
  EXPECT_FALSE(calls.take({"w1", 8}).has_value());
  EXPECT_FALSE(calls.take({"w2", 7}).has_value());
  std::optional<RunningCalls::RunningCall> taken = calls.take({"w1", 7});
  ASSERT_TRUE(taken.has_value());
  taken->stop.request_stop();
  EXPECT_TRUE(token.stop_requested());
  EXPECT_TRUE(calls.is_idle());
  EXPECT_FALSE(calls.take({"w1", 7}).has_value());
}

TEST(RunningCallsTest, TheEndOfACallerDoesNotConcernWhatOthersMayNeed) {
  RunningCalls calls;
  calls.add({"w1", 1}, {});
  calls.add({"w1", 2}, kept_call());
  calls.add({"w1", 3}, {});
  calls.add({"w2", 4}, {});
  EXPECT_EQ(calls.of_caller("w1"), (Keys{{"w1", 1}, {"w1", 3}}));
  EXPECT_EQ(calls.stop_sources().size(), 4U);
}

TEST(RunningCallsTest, WhatWaitsForTheEndOfACallGoesToWhoeverTakesItOut) {
  RunningCalls calls;
  int num_called = 0;
  const auto count = [&] { ++num_called; };
  EXPECT_FALSE(calls.on_end({"w1", 7}, count)) << "it has yet to come";
  calls.add({"w1", 7}, kept_call());
  EXPECT_TRUE(calls.on_end({"w1", 7}, count));
  EXPECT_TRUE(calls.on_end({"w1", 7}, count));
  const std::optional<RunningCalls::RunningCall> taken = calls.take({"w1", 7});
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(num_called, 0);
  for (const auto& fn : taken->on_end) fn();
  EXPECT_EQ(num_called, 2);
  EXPECT_FALSE(calls.on_end({"w1", 7}, count)) << "it has ended";
}

TEST(CallArrivalsTest, ACallThatIsCancelledBeforeItComesIsKnownOnce) {
  CallArrivals arrivals;
  arrivals.cancel(2);
  arrivals.cancel(2);
  EXPECT_FALSE(arrivals.add(1));
  EXPECT_TRUE(arrivals.add(2));
  EXPECT_FALSE(arrivals.add(2));
  EXPECT_EQ(arrivals.size(), 0U);
}

TEST(CallArrivalsTest, EachCancelledCallIsKnownHoweverManyThereAre) {
  CallArrivals arrivals;
  constexpr std::uint64_t kNumCalls = 10'000;
  for (std::uint64_t i = 1; i <= kNumCalls; ++i) arrivals.cancel(i);
  for (std::uint64_t i = 1; i <= kNumCalls; ++i) EXPECT_TRUE(arrivals.add(i));
  EXPECT_EQ(arrivals.size(), 0U);
}

TEST(CallArrivalsTest, ACancelThatComesAfterItsCallTakesNoMemory) {
  CallArrivals arrivals;
  for (std::uint64_t i = 2; i <= 10'000; ++i) {  // the first one is long, and still on its way
    EXPECT_FALSE(arrivals.add(i));
    arrivals.cancel(i);
  }
  arrivals.cancel(1);
  EXPECT_EQ(arrivals.size(), 10'000U);
  EXPECT_TRUE(arrivals.add(1));
  EXPECT_EQ(arrivals.size(), 0U);
}

// Calls, and what cancels some of them, come in any order.
TEST(CallArrivalsTest, InAnyOrderACallIsCancelledWhereItsCancelCameFirst) {
  std::mt19937_64 random(1);
  for (int program = 0; program < 200; ++program) {
    CallArrivals arrivals;
    std::vector<std::pair<std::uint64_t, bool>> events;  // sequence, whether the call itself
    const std::uint64_t num_calls = 1 + random() % 40;
    for (std::uint64_t i = 1; i <= num_calls; ++i) {
      events.emplace_back(i, true);
      if (random() % 2 == 0) events.emplace_back(i, false);
    }
    std::shuffle(events.begin(), events.end(), random);
    std::set<std::uint64_t> cancelled;
    for (const auto& [sequence, is_call] : events) {
      if (is_call) {
        EXPECT_EQ(arrivals.add(sequence), cancelled.count(sequence) > 0) << "program " << program;
      } else {
        arrivals.cancel(sequence);
        cancelled.insert(sequence);
      }
    }
    EXPECT_EQ(arrivals.size(), 0U) << "program " << program;
  }
}

}  // namespace
}  // namespace cohort::rpc

#include "cohort/rpc/internal/agent/running_calls.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

namespace cohort::rpc {
namespace {

using Keys = std::vector<RunningCalls::Key>;

RunningCalls::Call kept_call() {
  RunningCalls::Call call;
  call.is_kept = true;
  return call;
}

TEST(RunningCallsTest, ACallRunsUntilItIsTaken) {
  RunningCalls calls;
  RunningCalls::Call call;
  const std::stop_token token = call.stop.get_token();
  calls.add({"w1", 7}, std::move(call));
  EXPECT_FALSE(calls.is_idle());
  EXPECT_EQ(calls.describe(), (std::vector<std::string>{"the handler of call 7 of w1"}));
  EXPECT_FALSE(calls.take({"w1", 8}).has_value());
  EXPECT_FALSE(calls.take({"w2", 7}).has_value());
  std::optional<RunningCalls::Call> taken = calls.take({"w1", 7});
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

TEST(RunningCallsTest, ACallThatIsCancelledBeforeItComesIsKnownOnce) {
  RunningCalls calls;
  calls.remember_cancelled({"w1", 5});
  calls.remember_cancelled({"w1", 5});
  EXPECT_FALSE(calls.take_cancelled({"w2", 5}));
  EXPECT_TRUE(calls.take_cancelled({"w1", 5}));
  EXPECT_FALSE(calls.take_cancelled({"w1", 5}));
}

TEST(RunningCallsTest, TheOldestCancelledCallsAreForgotten) {
  RunningCalls calls;
  constexpr std::uint64_t kNumCalls = 5000;
  for (std::uint64_t id = 1; id <= kNumCalls; ++id) calls.remember_cancelled({"w1", id});
  EXPECT_FALSE(calls.take_cancelled({"w1", 1}));
  EXPECT_FALSE(calls.take_cancelled({"w1", kNumCalls - 4096}));
  EXPECT_TRUE(calls.take_cancelled({"w1", kNumCalls - 4095}));
  EXPECT_TRUE(calls.take_cancelled({"w1", kNumCalls}));
}

}  // namespace
}  // namespace cohort::rpc

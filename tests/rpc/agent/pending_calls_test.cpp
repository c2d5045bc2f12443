#include "cohort/rpc/internal/agent/pending_calls.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

PendingCall call_to(const std::string& worker) {
  PendingCall call("a result", nullptr);
  call.worker = worker;
  call.function = "embed";
  return call;
}

TEST(PendingCallsTest, ACallIsPendingUntilItIsTakenAndItsFunctionsHaveRun) {
  PendingCalls calls;
  const std::uint64_t id = calls.next_number();
  calls.add(id, call_to("w1"));
  ASSERT_NE(calls.find(id), nullptr);
  EXPECT_EQ(calls.find(id)->describe(id), "embed on w1, call 1");
  EXPECT_EQ(calls.describe(), (std::vector<std::string>{"embed on w1, call 1, which is not answered"}));
  EXPECT_FALSE(calls.is_idle());
  const PendingCalls::Node call = calls.take(id);
  ASSERT_FALSE(call.empty());
  EXPECT_EQ(calls.find(id), nullptr);
  EXPECT_TRUE(calls.describe().empty());
  EXPECT_TRUE(calls.is_finishing());
  EXPECT_FALSE(calls.is_idle());  // a function of its future may make a call
  calls.on_finished();
  EXPECT_FALSE(calls.is_finishing());
  EXPECT_TRUE(calls.is_idle());
}

TEST(PendingCallsTest, ACallThatHasEndedIsNotTakenAgain) {
  PendingCalls calls;
  EXPECT_TRUE(calls.take(1).empty());
  EXPECT_TRUE(calls.is_idle());
}

TEST(PendingCallsTest, ACallThatHasEndedKeepsNothingThatWaits) {
  PendingCalls calls;
  QueuedCall waiting;
  waiting.message = 7;
  EXPECT_FALSE(calls.on_queued(1, waiting)) << "its caller has given it up";
  EXPECT_EQ(waiting.message, 7U);
  calls.add(1, call_to("w1"));
  EXPECT_TRUE(calls.on_queued(1, waiting));
  EXPECT_EQ(calls.take_queued(1).message, 7U);
  QueuedCall none = calls.take_queued(1);
  EXPECT_EQ(none.message, 0U);
  EXPECT_FALSE(none.give_up());
  EXPECT_EQ(calls.take_queued(2).message, 0U);
}

TEST(PendingCallsTest, EachNumberIsGivenOnce) {
  PendingCalls calls;
  EXPECT_EQ(calls.next_number(), 1U);
  EXPECT_EQ(calls.next_number(), 2U);
}

TEST(PendingCallsTest, TextsShowANumberWithoutTheWorkerOfADynamicGroup) {
  PendingCalls calls;
  calls.begin_numbers_of(7);
  const std::uint64_t id = calls.next_number();
  EXPECT_EQ(id, 7'000'000'000'001U);
  EXPECT_EQ(call_to("w1").describe(id), "embed on w1, call 1");
}

TEST(PendingCallsTest, TheCallsOfAWorkerAreFound) {
  PendingCalls calls;
  for (const char* const worker : {"w1", "w2", "w1"}) calls.add(calls.next_number(), call_to(worker));
  const std::vector<std::pair<std::uint64_t, std::string>> expected = {{1, "embed on w1, call 1"},
                                                                       {3, "embed on w1, call 3"}};
  EXPECT_EQ(calls.of_worker("w1"), expected);
  EXPECT_EQ(calls.take_all().size(), 3U);
  EXPECT_EQ(calls.size(), 0U);
  EXPECT_TRUE(calls.is_idle());
}

TEST(PendingCallsTest, AFailedCallOfAContextFailsWhatWaitsForItsHistory) {
  PendingCall call = call_to("w1");
  call.attached.emplace("the answer", nullptr);
  auto result = call.promise.future();
  auto attached = call.attached->future();
  call.fail(std::make_exception_ptr(PeerError("rpc.call", "w1 died")));
  const base::Deadline deadline(std::chrono::seconds(5));
  COHORT_EXPECT_THROW_WITH(result.get(deadline), PeerError, "w1 died");
  COHORT_EXPECT_THROW_WITH(attached.get(deadline), PeerError, "w1 died");
}

}  // namespace
}  // namespace cohort::rpc

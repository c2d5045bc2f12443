// What becomes of calls whose callers give them up while they wait for the worker that they call.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/call_context.h"
#include "cohort/rpc/function.h"
#include "tests/rpc/faults.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/gate.h"

namespace cohort::test {
namespace {

using namespace std::chrono_literals;

std::unique_ptr<Gate> handlers_gate;
std::atomic<int> num_begun{0}, num_blocked{0};

void block_handler(const at::Tensor&) {
  ++num_blocked;
  handlers_gate->wait();
}
COHORT_REMOTE(block_handler);

void count_begun(const at::Tensor&) {
  ++num_begun;
}
COHORT_REMOTE(count_begun);

void keeps_reference(const rpc::RRef<at::Tensor>&, const at::Tensor&) {
  ++num_begun;
}
COHORT_REMOTE(keeps_reference);

Gate* stopping_gate = nullptr;
std::atomic<int> num_stopping{0}, num_stopped{0};
void blocks_as_it_stops() {
  const std::stop_callback callback(rpc::stop_token(), [] {
    ++num_stopping;
    stopping_gate->wait();
  });
  handlers_gate->wait();
}
COHORT_REMOTE(blocks_as_it_stops);

void waits_for_stop() {
  const std::stop_token token = rpc::stop_token();
  wait_until([&] { return token.stop_requested(); });
  ++num_stopped;
}
COHORT_REMOTE(waits_for_stop);

std::int64_t ms_left() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(rpc::remaining_deadline().remaining()).count();
}
COHORT_REMOTE(ms_left);

// 164 MB of calls, of which 64 MiB are on their way at a time.
TEST(AgentDeadlinesTest, OfManyCallsThatWereGivenUpNoneBeginsLater) {
  rpc::AgentOptions options;
  options.num_threads = 2;
  Job job(2, options);
  handlers_gate = std::make_unique<Gate>();
  num_begun = num_blocked = 0;
  std::vector<rpc::Future<void>> blocked, calls;
  const at::Tensor small = at::zeros({1}), argument = at::zeros({4096});
  for (int i = 0; i < options.num_threads; ++i) {
    blocked.push_back(job[0].rpc_async<block_handler>(rpc::Target("w1").within(0ms), small));
  }
  ASSERT_TRUE(comes_true([&] { return num_blocked == options.num_threads; }));
  for (int i = 0; i < 10'000; ++i) {
    calls.push_back(job[0].rpc_async<count_begun>(rpc::Target("w1").within(1s), argument));
  }
  for (rpc::Future<void>& call : calls) EXPECT_THROW(call.get(), TimeoutError);
  handlers_gate->open();
  for (rpc::Future<void>& call : blocked) call.get();
  EXPECT_TRUE(has_nothing_left(job[0]));
  EXPECT_TRUE(has_nothing_left(job[1]));
  EXPECT_EQ(num_begun, 0);
  job.shutdown();
}

// They wait for room at their caller, with and without a channel. The other worker learns of each all the
// same: it can leave, and the references that came with a call are dropped.
TEST(AgentDeadlinesTest, TheArgumentsOfACallThatWasGivenUpAsItWaitedDoNotTravel) {
  rpc::AgentOptions options;
  options.num_threads = 1;
  options.listen = "127.0.0.1:0";
  Job job(2, options);
  handlers_gate = std::make_unique<Gate>();
  num_begun = num_blocked = 0;
  std::vector<rpc::Future<void>> blocked;
  blocked.push_back(job[0].rpc_async<block_handler>(rpc::Target("w1").within(0ms), at::zeros({1})));
  ASSERT_TRUE(comes_true([] { return num_blocked == 1; }));
  // It fills the window until its handler begins.
  blocked.push_back(job[0].rpc_async<block_handler>(rpc::Target("w1").within(0ms), at::zeros({16 << 20})));
  const rpc::RRef<at::Tensor> object = job[0].make_rref(at::ones({1}));
  const at::Tensor large = at::zeros({4 << 20});
  EXPECT_THROW(job[0].rpc_sync<count_begun>(rpc::Target("w1").within(20ms), large), TimeoutError);
  EXPECT_THROW(job[0].rpc_sync<count_begun>(rpc::Target("w1").within(20ms).in_order("a"), large),
               TimeoutError);
  EXPECT_THROW(job[0].rpc_sync<keeps_reference>(rpc::Target("w1").within(20ms), object, large), TimeoutError);
  EXPECT_TRUE(comes_true([&] { return job[0].metrics().bytes_queued < 10'000; }))
      << job[0].metrics().bytes_queued;
  handlers_gate->open();
  for (rpc::Future<void>& call : blocked) call.get();
  job[0].rpc_sync<count_begun>(rpc::Target("w1").in_order("a"), at::zeros({1}));
  EXPECT_EQ(num_begun, 1);
  EXPECT_LT(job[0].metrics().bytes_sent, 70U << 20);
  EXPECT_TRUE(comes_true([&] { return job[1].metrics().references == 0; }));
  job.shutdown();
}

TEST(AgentDeadlinesTest, TheTimeLeftIsThatOfTheMomentWhenTheCallGoes) {
  rpc::AgentOptions options;
  options.num_threads = 1;
  Job job(2, options);
  handlers_gate = std::make_unique<Gate>();
  num_blocked = 0;
  std::vector<rpc::Future<void>> blocked;
  blocked.push_back(job[0].rpc_async<block_handler>(rpc::Target("w1").within(0ms), at::zeros({1})));
  ASSERT_TRUE(comes_true([] { return num_blocked == 1; }));
  // It fills the window until its handler begins.
  blocked.push_back(job[0].rpc_async<block_handler>(rpc::Target("w1").within(0ms), at::zeros({16 << 20})));
  const base::Deadline call_time(100s);
  rpc::Future<std::int64_t> left = job[0].rpc_async<ms_left>(rpc::Target("w1").within(100s));
  EXPECT_TRUE(comes_true([&] { return job[0].metrics().messages_queued == 1; }));
  EXPECT_TRUE(comes_true([&] { return call_time.elapsed() > 300ms; }));
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(call_time.elapsed());
  handlers_gate->open();
  EXPECT_LE(left.get(), 100'000 - waited.count());
  for (rpc::Future<void>& call : blocked) call.get();
  job.shutdown();
}

// It waits for its channel, or for a thread, behind a handler that takes longer.
TEST(AgentDeadlinesTest, ACallThatIsGivenUpBeforeItBeginsTakesNoMemoryAndNoRoom) {
  rpc::AgentOptions options;
  options.num_threads = 1;
  Job job(2, options);
  for (const bool has_channel : {false, true}) {
    handlers_gate = std::make_unique<Gate>();
    num_begun = num_blocked = 0;
    rpc::Target target("w1");
    if (has_channel) target = target.in_order("of the test");
    rpc::Future<void> blocked = job[0].rpc_async<block_handler>(target.within(0ms), at::zeros({1}));
    ASSERT_TRUE(comes_true([] { return num_blocked == 1; }));
    EXPECT_THROW(job[0].rpc_sync<count_begun>(target.within(200ms), at::zeros({8 << 20})), TimeoutError);
    rpc::AgentMetrics metrics;
    EXPECT_TRUE(comes_true([&] {
      metrics = job[0].metrics();
      return metrics.bytes_on_the_way == 0 && metrics.shared_bytes_in_use == 0;
    })) << metrics.bytes_on_the_way
        << " bytes are on the way, " << metrics.shared_bytes_in_use << " shared";
    handlers_gate->open();
    blocked.get();
    job[0].rpc_sync<count_begun>(target, at::zeros({1}));  // the place is free again
    EXPECT_EQ(num_begun, 1);
  }
  job.shutdown();
}

// Functions that the program gives futures and stop tokens run as a deadline passes.
TEST(AgentDeadlinesTest, AFunctionOfTheProgramThatTakesLongMakesNoOtherErrorLate) {
  rpc::AgentOptions options;
  options.num_threads = 4;
  Job job(2, options);
  handlers_gate = std::make_unique<Gate>();
  num_blocked = num_stopping = num_stopped = 0;
  Gate functions_gate;
  stopping_gate = &functions_gate;
  std::atomic<int> num_waiting{0};
  rpc::Future<void> first = job[0].rpc_async<blocks_as_it_stops>(rpc::Target("w1").within(50ms));
  rpc::Future<void> after = first.then([&](const rpc::Future<void>&) {
    ++num_waiting;
    functions_gate.wait();
  });
  ASSERT_TRUE(comes_true([&] { return num_waiting == 1 && num_stopping == 1; }));
  for (int i = 0; i < 3; ++i) {
    const base::Deadline begin(100ms);
    EXPECT_THROW(job[0].rpc_sync<waits_for_stop>(rpc::Target("w1").within(100ms)), TimeoutError);
    EXPECT_LT(begin.elapsed(), 100ms + deadline_slack());
  }
  EXPECT_TRUE(comes_true([] { return num_stopped == 3; })) << "handlers are asked to stop";
  functions_gate.open();
  handlers_gate->open();
  after.get();
  job.shutdown();
}

}  // namespace
}  // namespace cohort::test

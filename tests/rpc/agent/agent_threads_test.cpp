// Which thread reads an answer, and which one runs a handler.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/rpc/agent.h"
#include "cohort/rpc/dist_autograd.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::microseconds;
using std::chrono::seconds;
using test::agent_of;
using test::Job;

constexpr int kMany = 60;  // more calls than it takes for a quick function

std::string thread_of_handler() {
  char name[16] = "";
  ::pthread_getname_np(::pthread_self(), name, sizeof name);
  return name;
}
test::Gate* gate_of_quick = nullptr;
// Quick, but for where it waits for open_gate_of_quick().
int quick_or_waits(bool waits) {
  if (waits) gate_of_quick->wait();
  return 1;
}
void open_gate_of_quick() {
  gate_of_quick->open();
}
int number_of_w0() {
  return 7;
}
// Quick, but for where it calls w0, and a further function of this worker there.
int quick_or_calls(bool calls) {
  return calls ? agent_of("w1").rpc_sync<number_of_w0>("w0") : 7;
}
at::Tensor twice_as_much(const at::Tensor& x) {
  return 2 * x;
}
void wait_for_gate() {
  gate_of_quick->wait();
}
// Quick, but for where it waits for a further function of w0.
int quick_or_waits_for_w0(bool waits) {
  if (waits) agent_of("w1").rpc_sync<wait_for_gate>("w0");
  return 1;
}
COHORT_REMOTE(thread_of_handler);
COHORT_REMOTE(quick_or_waits);
COHORT_REMOTE(open_gate_of_quick);
COHORT_REMOTE(number_of_w0);
COHORT_REMOTE(quick_or_calls);
COHORT_REMOTE(twice_as_much);
COHORT_REMOTE(wait_for_gate);
COHORT_REMOTE(quick_or_waits_for_w0);

AgentOptions options_with_spin(microseconds spin) {
  AgentOptions options;
  options.spin = spin;
  return options;
}

TEST(AgentThreadsTest, AQuickFunctionStaysOnTheThreadThatReadsCalls) {
  Job job(2, options_with_spin(microseconds(0)));
  EXPECT_EQ(job[0].rpc_sync<thread_of_handler>("w1"), "rpc") << "of the pool";
  // A run that is put off its core counts as long.
  EXPECT_TRUE(test::comes_true([&] { return job[0].rpc_sync<thread_of_handler>("w1") == "net"; }));
  for (int i = 0; i < kMany; ++i) EXPECT_EQ(job[1].rpc_sync<thread_of_handler>("w1"), "rpc");
  job.shutdown();
}

TEST(AgentThreadsTest, AQuickFunctionThatWaitsHoldsNobodyUp) {
  for (const microseconds spin : {microseconds(0), microseconds(50)}) {
    Job job(2, options_with_spin(spin));
    test::Gate gate;
    gate_of_quick = &gate;
    for (int i = 0; i < kMany; ++i) job[0].rpc_sync<quick_or_waits>("w1", false);
    auto waiting = job[0].rpc_async<quick_or_waits>("w1", true);
    job[0].rpc_sync<open_gate_of_quick>("w1");
    EXPECT_EQ(waiting.get(), 1);
    for (int i = 0; i < kMany; ++i) job[0].rpc_sync<quick_or_waits>("w1", false);
    job.shutdown();
  }
}

TEST(AgentThreadsTest, AQuickFunctionMayCallOthersAndIsCalledMeanwhile) {
  for (const microseconds spin : {microseconds(0), microseconds(50)}) {
    Job job(2, options_with_spin(spin));
    for (int i = 0; i < kMany; ++i) EXPECT_EQ(job[0].rpc_sync<quick_or_calls>("w1", false), 7);
    std::vector<Future<int>> futures;
    for (int i = 0; i < kMany; ++i) futures.push_back(job[0].rpc_async<quick_or_calls>("w1", i % 3 == 0));
    for (auto& future : futures) EXPECT_EQ(future.get(), 7);
    job.shutdown();
  }
}

// Whoever waits longest reads for the others too, and its own modes are nothing to them.
TEST(AgentThreadsTest, AThreadThatWaitsReadsForOthersAndLeavesTheirGraphsAlone) {
  Job job(2, options_with_spin(seconds(10)));
  test::Gate gate;
  gate_of_quick = &gate;
  std::atomic<bool> begins{false};
  std::thread without_grad([&] {
    const c10::InferenceMode inference;
    auto future = job[0].rpc_async<wait_for_gate>("w1");
    begins = true;
    future.get();
  });
  while (!begins) std::this_thread::yield();
  for (int i = 0; i < kMany; ++i) {
    const at::Tensor x = at::ones({2}).requires_grad_();
    dist_autograd::Context context(job[0]);
    const at::Tensor y = job[0].rpc_sync<twice_as_much>("w1", x);
    ASSERT_TRUE(y.requires_grad());
    ASSERT_FALSE(y.is_inference());
    dist_autograd::backward(context, {y.sum()});
    EXPECT_TRUE(at::equal(dist_autograd::get_gradients(context).at(0).second, at::full({2}, 2.)));
  }
  gate.open();
  without_grad.join();
  job.shutdown();
}

// The call of a handler fails before the threads of handlers are waited for.
TEST(AgentThreadsTest, AnAgentThatStopsDoesNotWaitForTheCallsOfItsHandlers) {
  AgentOptions options = options_with_spin(microseconds(0));
  options.silence = seconds(1);
  Job job(2, options);
  test::Gate gate;
  gate_of_quick = &gate;
  for (int i = 0; i < kMany; ++i) job[0].rpc_sync<quick_or_waits_for_w0>("w1", false);
  auto waiting = job[0].rpc_async<quick_or_waits_for_w0>("w1", true);
  ASSERT_TRUE(test::comes_true([&] { return job[0].metrics().calls_unanswered == 1; }));
  const base::Deadline limit(seconds(3));
  job.drop(1);
  EXPECT_FALSE(limit.expired());
  gate.open();
  // It hears of w1's end, not of the error that the handler got.
  COHORT_EXPECT_THROW_WITH(waiting.get(), PeerError, "w1 could not be reached");
}

}  // namespace
}  // namespace cohort::rpc

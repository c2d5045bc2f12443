// Whom a call names and how long it waits; many calls at a time.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/agent.h"
#include "tests/rpc/job.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/gate.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::Job;

std::string name_of_caller() {
  return current_call()->caller;
}
WorkerInfo same_worker(const WorkerInfo& worker) {
  return worker;
}
test::Gate* gate_of_target = nullptr;
int wait_at_target_gate() {
  gate_of_target->wait();
  return 3;
}
int throws_lines() {
  throw std::invalid_argument("first line\n\tsecond \"line\"\\n\n\nlast line");
}
at::Tensor same_tensor(const at::Tensor& x) {
  return x;
}
int zero() {
  return 0;
}
double compute_long(const at::Tensor& x) {
  at::Tensor y = x;
  for (int i = 1; i < 100; ++i) y = y * i / (i + 1);
  return y.sum().item<double>();
}

COHORT_REMOTE(name_of_caller);
COHORT_REMOTE(same_worker);
COHORT_REMOTE(wait_at_target_gate);
COHORT_REMOTE(throws_lines);
COHORT_REMOTE(same_tensor);
COHORT_REMOTE(zero);
COHORT_REMOTE(compute_long);

TEST(AgentTargetsTest, ACallMayNameAWorkerByItsInfo) {
  Job job(3);
  for (const WorkerInfo& worker : job[0].workers()) {
    EXPECT_EQ(job[0].rpc_sync<name_of_caller>(worker), "w0");
    const RRef<std::string> name = job[0].remote<name_of_caller>(worker);
    EXPECT_EQ(name.owner(), worker);
    EXPECT_EQ(job[1].rpc_sync<name_of_caller>(name.owner()), "w1");
    EXPECT_EQ(job[0].rpc_sync<same_worker>(worker, worker), worker) << "it travels";
  }
  job.shutdown();
}

TEST(AgentTargetsTest, ACallMayNameAWorkerByItsId) {
  Job job(3);
  for (int id = 0; id < 3; ++id) {
    const std::string name = "w" + std::to_string(id);
    EXPECT_EQ(job[1].rpc_sync<name_of_caller>(id), "w1");
    EXPECT_EQ(job[1].rpc_async<name_of_caller>(to(id).within(seconds(20))).get(), "w1");
    EXPECT_EQ(job[1].remote<name_of_caller>(id).owner(), (WorkerInfo{name, id}));
    const at::Tensor sparse = job[1].rpc_sync<same_tensor>(id, at::eye(3).to_sparse());
    EXPECT_TRUE(sparse.is_sparse() && at::equal(sparse.to_dense(), at::eye(3)));
  }
  for (const int id : {-1, 3}) {
    const std::string error = "there is no worker " + std::to_string(id) + "; the ids are 0 to 2";
    COHORT_EXPECT_THROW_WITH(job[1].rpc_sync<name_of_caller>(id), UsageError, error);
    COHORT_EXPECT_THROW_WITH(job[1].rpc_async<name_of_caller>(id), UsageError, error);
    COHORT_EXPECT_THROW_WITH(job[1].remote<name_of_caller>(id), UsageError, error);
  }
  job.shutdown();
}

TEST(AgentTargetsTest, OwnersCompareAndAreKeys) {
  Job job(2);
  const RRef<int> a = job[0].make_rref(40), b = job[0].make_rref(50);
  const RRef<int> there = job[0].remote<zero>("w1"), also_there = job[0].remote<zero>("w1");
  EXPECT_EQ(a.owner(), b.owner());
  EXPECT_EQ(a.owner(), job[0].self());
  EXPECT_EQ(there.owner(), also_there.owner());
  EXPECT_EQ(there.owner(), job[1].self());
  EXPECT_NE(a.owner(), there.owner());
  std::map<WorkerInfo, int> of_owner;
  of_owner[a.owner()] = a.to_here();
  of_owner[there.owner()] = there.to_here();
  EXPECT_EQ(of_owner.size(), 2U);
  EXPECT_EQ(of_owner[b.owner()], 40);
  EXPECT_EQ(of_owner[also_there.owner()], 0);
  job.shutdown();
}

TEST(AgentTargetsTest, TheAgentsTimeoutEndsCallsThatHaveNoneOfTheirOwn) {
  AgentOptions options;
  options.timeout = milliseconds(150);
  Job job(2, options);
  test::Gate gate;
  gate_of_target = &gate;
  EXPECT_EQ(job[0].timeout(), milliseconds(150));
  const auto begin = std::chrono::steady_clock::now();
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<wait_at_target_gate>("w1"), TimeoutError,
                           "no answer within 150 ms");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(150) + test::deadline_slack());

  // A change is for calls that begin later.
  job[0].set_timeout(seconds(40));
  Future<int> long_call = job[0].rpc_async<wait_at_target_gate>("w1");
  job[0].set_timeout(milliseconds(50));
  EXPECT_EQ(job[0].timeout(), milliseconds(50));
  EXPECT_EQ(job[1].timeout(), milliseconds(150)) << "of each agent its own";
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<wait_at_target_gate>("w1"), TimeoutError,
                           "no answer within 50 ms");
  // Zero is none: of the agent, and of a call.
  Future<int> without = job[0].rpc_async<wait_at_target_gate>(to("w1").within(milliseconds(0)));
  job[0].set_timeout(milliseconds(0));
  Future<int> also_without = job[0].rpc_async<wait_at_target_gate>("w1");
  base::sleep(milliseconds(200), test::patience());
  EXPECT_FALSE(without.ready());
  EXPECT_FALSE(also_without.ready());
  COHORT_EXPECT_THROW_WITH(job[0].set_timeout(milliseconds(-1)), UsageError, "got a timeout of -1 ms");
  gate.open();
  EXPECT_EQ(wait_all(std::vector<Future<int>>{long_call, without, also_without}),
            (std::vector<int>{3, 3, 3}));
  job.shutdown();
}

TEST(AgentTargetsTest, AnAgentIsNotMadeWithANegativeTimeout) {
  test::MapStore store;
  AgentOptions options;
  options.timeout = milliseconds(-1);
  COHORT_EXPECT_THROW_WITH(Agent("w0", 0, 1, store, options), UsageError, "got a timeout of -1 ms");
}

TEST(AgentTargetsTest, ATextOfSeveralLinesArrivesWithItsLines) {
  Job job(2);
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<throws_lines>("w1"), std::invalid_argument,
                           "throws_lines on w1, call 1: first line\n\tsecond \"line\"\\n\n\nlast line");
  job.shutdown();
}

TEST(AgentTargetsTest, ManyCallsOfAllWorkersAreUnderWayAtTheSameTime) {
  Job job(3);
  const at::Tensor x = at::ones({100, 100}), sparse = at::eye(100).to_sparse();
  const double expected = compute_long(x), of_sparse = compute_long(sparse);
  std::vector<std::thread> threads;
  for (std::size_t id = 0; id < 3; ++id) {
    threads.emplace_back([&, id] {
      const int next = static_cast<int>((id + 1) % 3);
      std::vector<Future<int>> light;
      std::vector<Future<double>> heavy, heavy_sparse;
      for (int i = 0; i < 1'000; ++i) {
        light.push_back(job[id].rpc_async<zero>(next));
        if (i % 50 != 0) continue;
        heavy.push_back(job[id].rpc_async<compute_long>(next, x));
        heavy_sparse.push_back(job[id].rpc_async<compute_long>(next, sparse));
      }
      EXPECT_EQ(wait_all(light), std::vector<int>(1'000, 0));
      EXPECT_EQ(wait_all(heavy), std::vector<double>(20, expected));
      EXPECT_EQ(wait_all(heavy_sparse), std::vector<double>(20, of_sparse));
    });
  }
  for (std::thread& thread : threads) thread.join();
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc

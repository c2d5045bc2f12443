// What shutdown() waits for, and what is left after it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/agent.h"
#include "tests/rpc/job.h"
#include "tests/support/patience.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using test::agent_of;
using test::Job;
using test::patience;

std::atomic<int> num_links{0};
// Calls the worker after this one, and does not wait for it.
void call_the_next(const std::string& here, int left) {
  ++num_links;
  if (left == 0) return;
  const std::string next = here == "w0" ? "w1" : here == "w1" ? "w2" : "w0";
  agent_of(here).rpc_async<call_the_next>(next, next, left - 1);
}
// The same, by objects that nobody uses.
int make_the_next(const std::string& here, int left) {
  ++num_links;
  if (left == 0) return 0;
  const std::string next = here == "w0" ? "w1" : here == "w1" ? "w2" : "w0";
  agent_of(here).remote<make_the_next>(next, next, left - 1);
  return left;
}
at::Tensor negative_of(const at::Tensor& x) {
  return -x;
}
at::Tensor fetched_here(const RRef<at::Tensor>& x) {
  return x.to_here();
}
class Ring {
 public:
  void hold(RRef<Ring> next) { next_ = std::move(next); }

 private:
  RRef<Ring> next_;
};
std::shared_ptr<Ring> make_ring() {
  return std::make_shared<Ring>();
}

COHORT_REMOTE(call_the_next);
COHORT_REMOTE(make_the_next);
COHORT_REMOTE(negative_of);
COHORT_REMOTE(fetched_here);
COHORT_REMOTE(make_ring);
COHORT_REMOTE(Ring::hold);

TEST(AgentShutdownTest, CallsThatNobodyWaitsForAreAnswered) {
  for (int round = 0; round < 10; ++round) {
    Job job(3);
    num_links = 0;
    job[0].rpc_async<call_the_next>("w1", "w1", 30);
    job[2].remote<make_the_next>("w0", "w0", 30);
    job.shutdown();
    EXPECT_EQ(num_links, 62) << "round " << round;
  }
}

// A call that was given up before it was sent must not hold up the end.
TEST(AgentShutdownTest, CallsThatWereNeverSentAreNotWaitedFor) {
  Job job(2);
  const at::Tensor no_memory = at::empty({2}, at::TensorOptions(at::kMeta));
  EXPECT_THROW(job[0].rpc_sync<negative_of>("w1", no_memory), UsageError);
  EXPECT_THROW(job[0].remote<negative_of>("w1", no_memory).to_here(), UsageError);
  job.shutdown();
}

// A worker whose shutdown() has thrown may call on: the others stay until it comes again.
TEST(AgentShutdownTest, NobodyLeavesBeforeAWorkerThatHasGivenUp) {
  Job job(3);
  COHORT_EXPECT_THROW_WITH(job[0].shutdown(base::Deadline(milliseconds(100))), TimeoutError,
                           "w1, which has not come to shutdown()");
  // Until both have heard it. A call would tell them too: its number is not in the last report.
  base::sleep(milliseconds(200), patience());
  std::atomic<int> num_left{0};
  std::vector<std::thread> threads;
  for (const std::size_t id : {1, 2}) {
    threads.emplace_back([&, id] {
      job[id].shutdown(patience());
      ++num_left;
    });
  }
  base::sleep(milliseconds(200), patience());  // both have said that they have nothing to do
  EXPECT_EQ(num_left, 0);
  for (const char* worker : {"w1", "w2"}) {
    EXPECT_NO_THROW(job[0].rpc_sync<negative_of>(worker, at::ones({2})));
  }
  job[0].shutdown(patience());
  for (std::thread& thread : threads) thread.join();
}

TEST(AgentShutdownTest, AReferenceMayOutliveItsAgent) {
  RRef<at::Tensor> there, here;
  {
    Job job(2);
    there = job[0].remote<negative_of>("w1", at::ones({2}));
    here = job[0].make_rref(at::ones({2}));
    EXPECT_TRUE(at::equal(there.to_here(), -at::ones({2})));
    job.shutdown();
    for (const RRef<at::Tensor>& rref : {there, here}) {
      COHORT_EXPECT_THROW_WITH(rref.to_here(), UsageError, "its agent has been stopped");
      COHORT_EXPECT_THROW_WITH(rref.confirmed_by_owner(), UsageError, "its agent has been stopped");
      COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<fetched_here>("w1", rref), UsageError,
                               "this agent has been stopped");
      COHORT_EXPECT_THROW_WITH(job[0].remote<fetched_here>("w1", rref), UsageError,
                               "this agent has been stopped");
    }
    COHORT_EXPECT_THROW_WITH(here.local_value(), UsageError, "its agent has been stopped");
  }
  COHORT_EXPECT_THROW_WITH(there.to_here(), UsageError, "its agent has been stopped");
  COHORT_EXPECT_THROW_WITH(here.to_here(), UsageError, "its agent has been stopped");
  EXPECT_EQ(there.owner().name, "w1");
}

TEST(AgentShutdownTest, AnotherAgentMayFollowOverTheSameStore) {
  Job job(2);
  EXPECT_TRUE(at::equal(job[0].rpc_sync<negative_of>("w1", at::ones({2})), -at::ones({2})));
  job.shutdown();
  std::vector<std::thread> threads;
  for (int id = 0; id < 2; ++id) {
    threads.emplace_back([&, id] {
      Agent next("next/" + std::to_string(id), id, 2, job.store());
      const std::string other = "next/" + std::to_string(1 - id);
      EXPECT_TRUE(at::equal(next.rpc_sync<negative_of>(other, at::ones({2})), -at::ones({2})));
      next.shutdown(patience());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(AgentShutdownTest, ObjectsThatAreLeftAreWrittenToTheLog) {
  std::mutex mutex;
  std::string lines;
  base::set_log_level(base::LogLevel::kInfo);
  base::set_log_sink([&](base::LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    lines += line;
  });
  {
    Job job(2);
    // Two objects that hold each other.
    const RRef<Ring> a = job[0].remote<make_ring>("w0"), b = job[0].remote<make_ring>("w1");
    a.rpc_sync<&Ring::hold>(b);
    b.rpc_sync<&Ring::hold>(a);
    job.shutdown();
  }
  base::set_log_sink({});
  const std::lock_guard lock(mutex);
  EXPECT_NE(lines.find("at the end of w1: object 0."), std::string::npos) << lines;
  EXPECT_NE(lines.find("shutdown_test.cpp:"), std::string::npos) << lines;
  EXPECT_NE(lines.find(" by make_ring, held by "), std::string::npos) << lines;
}

}  // namespace
}  // namespace cohort::rpc

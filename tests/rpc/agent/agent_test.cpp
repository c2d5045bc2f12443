#include "cohort/rpc/agent.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/init.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/gate.h"
#include "tests/support/patience.h"
#include "tests/support/processes.h"
#include "tests/support/stores/map_store.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

using test::agent_of;
using test::Job;
using test::patience;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) {
  return a + b;
}
std::string whoami() {
  return current_call()->caller;
}
int fails(const std::string& how) {
  if (how == "data") throw DataError("data.test", "it is broken", "another one");
  throw std::out_of_range("far");
}
// Calls itself on the worker after this one, `depth` times.
int chain(const std::string& here, int depth) {
  if (depth == 0) return 0;
  const std::string next = here == "w2" ? "w0" : here == "w0" ? "w1" : "w2";
  return 1 + agent_of(here).rpc_sync<chain>(next, next, depth - 1);
}
std::atomic<int> begun{0}, stopped{0};
void sleep_until_stopped() {
  ++begun;
  const std::stop_token stop = stop_token();
  test::wait_until([&] { return stop.stop_requested(); });
  ++stopped;
}
void sleep_for(int ms) {
  base::sleep(milliseconds(ms), patience());
}
double left_in_ms() {
  return std::chrono::duration<double, std::milli>(remaining_deadline().remaining()).count();
}
double left_in_ms_there(const std::string& here, const std::string& there) {
  return agent_of(here).rpc_sync<left_in_ms>(to(there).within(seconds(50)));
}
Promise<int>* promised = nullptr;
Future<int> answers_later() {
  return promised->future();
}
// As in docs/guide/rpc.md.
std::mutex batch_mutex;  // of the two below
std::vector<at::Tensor> parts_of_batch;
std::optional<Promise<at::Tensor>> promise_of_batch(std::in_place);
Future<at::Tensor> sum_of_batch(const at::Tensor& part) {
  const std::lock_guard lock(batch_mutex);
  Future<at::Tensor> sum = promise_of_batch->future();
  parts_of_batch.push_back(part);
  if (parts_of_batch.size() == 3) {
    promise_of_batch->set_value(at::stack(std::exchange(parts_of_batch, {})).sum(0));
    promise_of_batch.emplace();
  }
  return sum;
}
test::Gate* gate_of_handlers = nullptr;
void wait_at_gate(const at::Tensor&) {
  gate_of_handlers->wait();
}
at::Tensor without_data() {
  return at::empty({3}, at::kMeta);
}
std::string blob(const std::string& text) {
  return text;
}

COHORT_REMOTE(add);
COHORT_REMOTE(whoami);
COHORT_REMOTE(fails);
COHORT_REMOTE(chain);
COHORT_REMOTE(sleep_until_stopped);
COHORT_REMOTE(sleep_for);
COHORT_REMOTE(left_in_ms);
COHORT_REMOTE(left_in_ms_there);
COHORT_REMOTE(answers_later);
COHORT_REMOTE(sum_of_batch);
COHORT_REMOTE(without_data);
COHORT_REMOTE(wait_at_gate);
COHORT_REMOTE(blob);
COHORT_REMOTE_LAMBDA(square, [](double x) { return x * x; });

TEST(AgentTest, CallsAreAnsweredByTheWorkerThatIsNamed) {
  Job job(3);
  EXPECT_EQ(job[1].workers("*").size(), 3U);
  EXPECT_EQ(job[1].workers("w2"), (std::vector<WorkerInfo>{{"w2", 2}}));
  EXPECT_TRUE(job[1].workers("x*").empty());
  const at::Tensor x = at::arange(6, at::kFloat).view({2, 3});
  for (const char* worker : {"w0", "w1", "w2"}) {
    EXPECT_TRUE(at::equal(job[1].rpc_sync<add>(worker, x, x.t().t() * 2), x * 3)) << worker;
    EXPECT_EQ(job[1].rpc_sync<whoami>(worker), "w1");
  }
  const at::Tensor large = at::randn({1 << 20});
  std::vector<Future<at::Tensor>> results;
  for (int i = 0; i < 8; ++i) results.push_back(job[0].rpc_async<add>("w2", large, at::full({1}, i)));
  EXPECT_EQ(job[0].rpc_sync<whoami>("w2"), "w0");
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(at::equal(results[static_cast<std::size_t>(i)].get(), large + i));
  EXPECT_EQ(job[0].rpc_sync<square>("w2", 3), 9);
  const std::string text(3 << 20, 'x');
  EXPECT_EQ(job[2].rpc_sync<blob>("w0", text), text);
  EXPECT_GE(job[0].metrics().calls_made, 9U);
  EXPECT_GE(job[2].metrics().calls_handled, 9U);
  job.shutdown();
}

TEST(AgentTest, ErrorsArriveWithTypeWorkerAndCall) {
  Job job(2);
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<fails>("w1", "data"), DataError,
                           "[rpc.call] fails on w1, call 1: [data.test] it is broken. Try: another one");
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<fails>("w1", "std"), std::out_of_range,
                           "fails on w1, call 2: far");
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<fails>("w0", "std"), std::out_of_range,
                           "fails on w0, call 3: far");
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<whoami>("w7"), UsageError,
                           "there is no worker 'w7'; the workers are w0, w1");
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<without_data>("w1"), UsageError, "cannot travel");
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<add>("w1", at::empty({1}, at::kMeta), at::ones({1})), UsageError,
                           "cannot travel");
  EXPECT_EQ(job[0].metrics().calls_pending, 0U);
  job.shutdown();
}

TEST(AgentTest, NestedCallsDoNotUseThePoolUp) {
  AgentOptions options;
  options.num_threads = 1;
  Job job(3, options);
  EXPECT_EQ(job[0].rpc_sync<chain>("w0", "w0", 30), 30);
  std::vector<Future<int>> results;
  for (int i = 0; i < 10; ++i) results.push_back(job[1].rpc_async<chain>("w2", "w2", 7));
  for (auto& result : results) EXPECT_EQ(result.get(), 7);
  job.shutdown();
}

TEST(AgentTest, ACallEndsAtItsDeadlineAndItsHandlerIsAskedToStop) {
  Job job(2);
  begun = stopped = 0;
  const auto begin = Clock::now();
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<sleep_until_stopped>(to("w1").within(milliseconds(200))),
                           TimeoutError, "sleep_until_stopped on w1, call 1: no answer within 200 ms");
  const auto took = Clock::now() - begin;
  EXPECT_GE(took, milliseconds(199));
  EXPECT_LT(took, milliseconds(200) + test::deadline_slack());
  EXPECT_TRUE(test::comes_true([] { return stopped == 1; }));
  job.shutdown();
}

TEST(AgentTest, AHandlerWhoseTimeIsOverDoesNotBegin) {
  AgentOptions options;
  options.num_threads = 1;
  Job job(2, options);
  begun = 0;
  Future<void> busy = job[0].rpc_async<sleep_for>("w1", 300);
  Future<void> late = job[0].rpc_async<sleep_until_stopped>(to("w1").within(milliseconds(50)));
  EXPECT_THROW(late.get(), TimeoutError);
  busy.get();
  EXPECT_EQ(job[0].rpc_sync<whoami>("w1"), "w0");
  EXPECT_EQ(begun, 0);
  job.shutdown();
}

TEST(AgentTest, NestedCallsInheritWhatIsLeft) {
  Job job(3);
  const double left = job[0].rpc_sync<left_in_ms_there>(to("w1").within(seconds(20)), "w1", "w2");
  EXPECT_LT(left, 20'000);
  EXPECT_GT(left, 1'000);
  job.shutdown();
}

TEST(AgentTest, AHandlerMayAnswerLater) {
  Job job(2);
  Promise<int> promise;
  promised = &promise;
  Future<int> result = job[0].rpc_async<answers_later>("w1");
  EXPECT_TRUE(test::comes_true([&] { return job[1].metrics().calls_unanswered == 1; }));
  EXPECT_FALSE(result.ready());
  promise.set_value(5);
  EXPECT_EQ(result.get(), 5);
  job.shutdown();
}

TEST(AgentTest, CallersOfOnePromiseGetTensorsOfTheirOwn) {
  Job job(2);
  for (int batch = 1; batch <= 20; ++batch) {
    const at::Tensor part = at::full({4}, static_cast<double>(batch));
    std::vector<Future<at::Tensor>> sums;
    for (const std::size_t caller : {1U, 0U, 1U}) {
      sums.push_back(job[caller].rpc_async<sum_of_batch>("w1", part));
    }
    for (Future<at::Tensor>& sum : sums) {
      at::Tensor result = sum.get();
      EXPECT_TRUE(at::equal(result, part * 3)) << batch;
      result.fill_(-1);
    }
  }
  job.shutdown();
}

TEST(AgentTest, TheEndOfAWorkerEndsItsCalls) {
  Job job(2);
  begun = stopped = 0;
  Future<void> call = job[1].rpc_async<sleep_until_stopped>("w0");
  test::wait_until([] { return begun == 1; });
  Future<void> other = job[0].rpc_async<sleep_for>("w1", 20);
  other.get();
  job.drop(1);  // the caller
  EXPECT_TRUE(test::comes_true([] { return stopped == 1; })) << "nobody waits for it any more";
  COHORT_EXPECT_THROW_WITH(call.get(), UsageError, "this agent has been stopped");
  EXPECT_TRUE(test::comes_true([&] {
    try {
      job[0].rpc_sync<whoami>("w1");
    } catch (const PeerError& error) {
      return std::string(error.what()).find(": w1 could not be reached") != std::string::npos;
    }
    return false;
  }));
}

TEST(AgentTest, ShutdownWaitsForAllAndNamesWhoIsMissing) {
  Job job(3);
  Future<void> call = job[0].rpc_async<sleep_for>("w1", 100);
  COHORT_EXPECT_THROW_WITH(job[1].shutdown(base::Deadline(milliseconds(300))), TimeoutError,
                           "w0, which has not come to shutdown(), w2, which has not come to shutdown()");
  call.get();
  EXPECT_EQ(job[2].rpc_sync<whoami>("w1"), "w2") << "calls are answered meanwhile";
  job.shutdown();
}

TEST(AgentTest, ShutdownMayBeCalledAgainAndByTwoThreads) {
  Job job(2);
  std::thread other([&] { job[0].shutdown(patience()); });
  job.shutdown();
  other.join();
  job[0].shutdown(patience());
  job[1].shutdown(patience());
}

TEST(AgentTest, NamesAreChecked) {
  test::MapStore store;
  COHORT_EXPECT_THROW_WITH(Agent("", 0, 1, store), UsageError, "'' is no name of a worker");
  COHORT_EXPECT_THROW_WITH(Agent("a b", 0, 1, store), UsageError, "'a b' is no name");
  COHORT_EXPECT_THROW_WITH(Agent(std::string(128, 'a'), 0, 1, store), UsageError, "is no name");
  for (const char* device : {"cpu", "cuda:0", "cpu:1"}) {
    COHORT_EXPECT_THROW_WITH(Agent(device, 0, 1, store), UsageError, "is that of a device");
  }
  Agent alone("cpus/0", 0, 1, store);
  EXPECT_EQ(alone.rpc_sync<whoami>("cpus/0"), "cpus/0");
  alone.shutdown(patience());

  test::MapStore shared;
  std::vector<std::thread> threads;
  std::atomic<int> rejected{0};
  for (int id = 0; id < 2; ++id) {
    threads.emplace_back([&, id] {
      COHORT_EXPECT_THROW_WITH(Agent("same", id, 2, shared), UsageError, "two workers are named 'same'");
      ++rejected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(rejected, 2);
}

TEST(AgentTest, AWorkerThatDoesNotComeIsNamed) {
  test::MapStore store;
  AgentOptions options;
  options.join_timeout = milliseconds(200);
  COHORT_EXPECT_THROW_WITH(Agent("w0", 0, 3, store, options), RendezvousError,
                           "of 3 workers these did not come within 200 ms: 1, 2");
}

TEST(AgentTest, IdleWorkersOutliveAShortSilence) {
  AgentOptions options;
  options.silence = milliseconds(200);
  const auto outlives = [&] {
    Job job(2, options);
    base::sleep(milliseconds(800), patience());
    try {
      return job[0].rpc_sync<whoami>("w1") == "w0";
    } catch (const PeerError&) {
      return false;
    }
  };
  // A busy machine may hold up a worker's thread for as long.
  EXPECT_TRUE(outlives() || outlives() || outlives());
  options.silence = milliseconds(7);
  test::MapStore store;
  COHORT_EXPECT_THROW_WITH(Agent("w0", 0, 1, store, options), UsageError, "got a silence of 7 ms");
}

// Ranks as processes: rank 1 is killed while it answers.
TEST(AgentChild, DISABLED_Rank) {
  const std::string rank = std::getenv("RANK");
  COHORT_EXPECT_THROW_WITH(agent(), UsageError, "this process has no agent");
  init_rpc("rank/" + rank);
  COHORT_EXPECT_THROW_WITH(init_rpc("other"), UsageError, "this process has an agent");
  EXPECT_EQ(workers("rank/*").size(), 2U);
  if (rank == "1") {
    base::sleep(seconds(60), patience());
    return;
  }
  EXPECT_EQ(rpc_sync<whoami>("rank/1"), "rank/0");
  Future<void> call = rpc_async<sleep_for>("rank/1", 30'000);
  std::printf("called\n");
  std::fflush(stdout);
  try {
    call.get();
  } catch (const PeerError& error) {
    std::printf("%s\n", error.what());
    std::fflush(stdout);
    std::_Exit(7);
  }
}

TEST(AgentTest, AKilledProcessEndsTheCallsToIt) {
  test::RankProcesses ranks("AgentChild", 2);
  ranks.wait_for(0, "called");
  ranks.send(1, SIGKILL);
  EXPECT_EQ(ranks.wait()[0], 7) << ranks.output(0);
  EXPECT_NE(ranks.output(0).find("[rpc.call] sleep_for on rank/1, call 2: rank/1 died (process "),
            std::string::npos)
      << ranks.output(0);
}

// In place of torchrun's variables those that another launcher gives two ranks of one host.
void take_variables_of(const std::string& launcher, const std::string& rank) {
  std::vector<std::pair<const char*, std::string>> variables;
  if (launcher == "srun") {
    variables = {{"SLURM_PROCID", rank},          {"SLURM_NTASKS", "2"},
                 {"SLURM_LOCALID", rank},         {"SLURM_NODEID", "0"},
                 {"SLURM_STEP_ID", "0"},          {"SLURM_JOB_ID", "77"},
                 {"SLURM_STEP_NODELIST", "gpu7"}, {"SLURM_STEP_TASKS_PER_NODE", "2"}};
  } else if (launcher == "mpirun") {
    variables = {{"OMPI_COMM_WORLD_RANK", rank},
                 {"OMPI_COMM_WORLD_SIZE", "2"},
                 {"OMPI_COMM_WORLD_LOCAL_RANK", rank},
                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                 {"PMIX_NAMESPACE", "12345"}};
  } else {
    return;
  }
  // MASTER_PORT stays: other jobs of this host may have the launcher's port.
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}) {
    ::unsetenv(name);
  }
  for (const auto& [name, value] : variables) ::setenv(name, value.c_str(), 1);
}

// The same, to the end.
TEST(InitChild, DISABLED_Rank) {
  const std::string rank = std::getenv("RANK");
  take_variables_of(std::getenv("TEST_LAUNCHER"), rank);
  init_rpc("rank/" + rank);
  EXPECT_EQ(rpc_sync<whoami>(rank == "0" ? "rank/1" : "rank/0"), "rank/" + rank);
  const RRef<std::string> name = remote<blob>("rank/1", "text");
  EXPECT_EQ(name.to_here(), "text");
  shutdown();
  COHORT_EXPECT_THROW_WITH(agent(), UsageError, "this process has no agent");
}

TEST(AgentTest, AProcessHasAnAgent) {
  std::list<test::RankProcesses> jobs;
  for (const char* launcher : {"torchrun", "srun", "mpirun"}) {
    jobs.emplace_back("InitChild", 2,
                      std::vector<std::pair<std::string, std::string>>{{"TEST_LAUNCHER", launcher}});
  }
  for (test::RankProcesses& ranks : jobs) {
    EXPECT_EQ(ranks.wait(), (std::vector<int>{0, 0})) << ranks.output(0) << ranks.output(1);
  }
}

// Handlers may wait for these answers, so without them the calls would never end.
TEST(AgentTest, AnswersComeWhileCallsFillTheWindow) {
  AgentOptions options;
  options.num_threads = 1;
  Job job(2, options);
  test::Gate gate;
  gate_of_handlers = &gate;
  const at::Tensor large = at::zeros({1 << 20}, at::kByte);
  std::vector<Future<void>> calls;
  for (int i = 0; i < 70; ++i) calls.push_back(job[0].rpc_async<wait_at_gate>("w1", large));
  EXPECT_TRUE(test::comes_true([&] { return job[1].metrics().calls_unanswered > 60; }));
  EXPECT_EQ(job[1].rpc_sync<whoami>(to("w0").within(seconds(5))), "w1");
  EXPECT_LT(job[1].metrics().calls_unanswered, 70U) << "the window is full";
  gate.open();
  for (Future<void>& call : calls) call.get();
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc

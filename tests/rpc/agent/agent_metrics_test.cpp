#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/init.h"
#include "cohort/rpc/internal/agent/agent_state.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"
#include "tests/support/patience.h"
#include "tests/support/processes.h"
#include "tests/support/processes/log_lines.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

using test::comes_true;
using test::Job;
using test::patience;

std::int64_t take_ms(std::int64_t ms) {
  base::sleep(milliseconds(ms), patience());
  if (ms == 0) throw DataError("test.metrics", "it takes no time");
  return ms;
}
test::Gate* gate_of_counted = nullptr;
void wait_counted(const at::Tensor&) {
  gate_of_counted->wait();
}
void run_until_stopped() {
  test::wait_until([] { return stop_token().stop_requested(); });
}
Promise<int>* promise_of_counted = nullptr;
Future<int> answer_counted() {
  return promise_of_counted->future();
}
at::Tensor make_counted(std::int64_t size) {
  return at::ones({size});
}
RRef<at::Tensor> counted_on_w1;
void keep_counted(const RRef<at::Tensor>& tensor) {
  counted_on_w1 = tensor;
}
// Its backward waits.
struct CountedInBackward : torch::autograd::Function<CountedInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return 2 * x; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          const std::vector<at::Tensor>& gradients) {
    gate_of_counted->wait();
    return {2 * gradients.at(0)};
  }
};
at::Tensor twice_counted(const at::Tensor& x) {
  return CountedInBackward::apply(x);
}
COHORT_REMOTE(twice_counted);
COHORT_REMOTE(take_ms);
COHORT_REMOTE(wait_counted);
COHORT_REMOTE(run_until_stopped);
COHORT_REMOTE(answer_counted);
COHORT_REMOTE(make_counted);
COHORT_REMOTE(keep_counted);

// How often `part` stands in one of the lines.
std::ptrdiff_t count_of(const std::vector<std::string>& lines, const std::string& part) {
  return std::count_if(lines.begin(), lines.end(),
                       [&](const std::string& line) { return line.find(part) != std::string::npos; });
}
FunctionMetrics of_function(const AgentMetrics& metrics, const std::string& name) {
  for (const FunctionMetrics& function : metrics.functions) {
    if (function.name == name) return function;
  }
  return {};
}

TEST(AgentMetricsTest, FunctionsHaveTheirTimesAndErrors) {
  Job job(2);
  for (int i = 0; i < 3; ++i) job[0].rpc_sync<take_ms>("w1", 20);
  EXPECT_THROW(job[0].rpc_sync<take_ms>("w1", 0), DataError);
  EXPECT_THROW(job[0].rpc_sync<take_ms>(to("w1").within(milliseconds(100)), 400), TimeoutError);
  job[0].rpc_sync<make_counted>("w1", 1);
  const AgentMetrics metrics = job[0].metrics();
  ASSERT_EQ(metrics.functions.size(), 2U);
  const FunctionMetrics slow = of_function(metrics, "take_ms"), fast = of_function(metrics, "make_counted");
  EXPECT_EQ(slow.num_calls, 5U);
  EXPECT_EQ(slow.num_errors, 2U);
  EXPECT_GE(slow.p50, milliseconds(20));
  EXPECT_LE(slow.p50, slow.p99);
  EXPECT_LE(slow.p99, slow.max);
  EXPECT_GE(slow.max, milliseconds(99)) << "also that of a call that was given up";
  EXPECT_EQ(fast.num_calls, 1U);
  EXPECT_EQ(fast.num_errors, 0U);
  EXPECT_GT(fast.p50.count(), 0);
  EXPECT_EQ(metrics.calls_made, 6U);
  EXPECT_GT(metrics.calls_made_per_second, 0.5);
  EXPECT_EQ(metrics.calls_handled_per_second, 0);
  const AgentMetrics there = job[1].metrics();
  EXPECT_EQ(there.calls_handled, 6U);
  EXPECT_GT(there.calls_handled_per_second, 0.5);
  EXPECT_EQ(there.calls_made_per_second, 0);
  EXPECT_TRUE(there.functions.empty()) << "which w1 did not call";
  job.shutdown();
}

TEST(AgentMetricsTest, HandlersWaitRunOrAnswerLater) {
  AgentOptions options;
  options.num_threads = 1;
  Job job(2, options);
  test::Gate gate;
  gate_of_counted = &gate;
  Promise<int> promise;
  promise_of_counted = &promise;
  Future<int> later = job[0].rpc_async<answer_counted>("w1");
  EXPECT_TRUE(comes_true([&] {
    const AgentMetrics there = job[1].metrics();
    return there.calls_unanswered == 1 && there.handlers_queued + there.handlers_on_threads == 0 &&
           there.calls_handled == 1;
  }));
  std::vector<Future<void>> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(job[0].rpc_async<wait_counted>("w1", at::ones({1})));
  EXPECT_TRUE(comes_true([&] {
    const AgentMetrics there = job[1].metrics();
    return there.calls_unanswered == 4 && there.handlers_queued == 2 && there.handlers_on_threads == 1;
  })) << to_string(job[1].metrics());
  EXPECT_EQ(job[0].metrics().calls_pending, 4U);
  // A caller that gives up leaves its call in the queue until it is its turn.
  EXPECT_THROW(job[0].rpc_sync<wait_counted>(to("w1").within(milliseconds(20)), at::ones({1})), TimeoutError);
  EXPECT_TRUE(comes_true([&] {
    const AgentMetrics there = job[1].metrics();
    return there.calls_unanswered == 4 && there.handlers_queued == 3;
  })) << to_string(job[1].metrics());
  gate.open();
  for (Future<void>& call : calls) call.get();
  promise.set_value(5);
  EXPECT_EQ(later.get(), 5);
  EXPECT_TRUE(comes_true([&] {
    const AgentMetrics there = job[1].metrics();
    return there.calls_unanswered + there.handlers_queued + there.handlers_on_threads == 0;
  })) << to_string(job[1].metrics());
  EXPECT_EQ(job[0].metrics().calls_pending, 0U);
  job.shutdown();
}

TEST(AgentMetricsTest, NoHandlerIsQueuedOnceTheAgentHasStopped) {
  Job job(2);
  const std::shared_ptr<AgentState> there = job[1].state();
  const Target channel = to("w1").in_order("a");
  const std::vector<Future<void>> calls{job[0].rpc_async<run_until_stopped>(channel),
                                        job[0].rpc_async<run_until_stopped>(channel)};
  EXPECT_TRUE(comes_true([&] {
    const AgentMetrics metrics = there->metrics();
    return metrics.handlers_queued == 1 && metrics.handlers_on_threads == 1;
  })) << to_string(there->metrics());
  job.drop(1);
  const AgentMetrics left = there->metrics();
  EXPECT_EQ(left.handlers_queued + left.handlers_on_threads + left.calls_unanswered, 0U) << to_string(left);
}

TEST(AgentMetricsTest, BytesAreCountedForEachWorker) {
  AgentOptions options;
  options.num_threads = 1;
  Job job(3, options);
  test::Gate gate;
  gate_of_counted = &gate;
  const at::Tensor large = at::zeros({1 << 20}, at::kByte);
  std::vector<Future<void>> calls;
  for (int i = 0; i < 70; ++i) calls.push_back(job[0].rpc_async<wait_counted>("w1", large));
  EXPECT_TRUE(comes_true([&] {
    const AgentMetrics sent = job[0].metrics();
    return sent.bytes_sent + sent.bytes_by_handle > (60U << 20);
  }));
  const AgentMetrics metrics = job[0].metrics();
  ASSERT_EQ(metrics.traffic.size(), 2U);
  EXPECT_EQ(metrics.traffic[0].transport, "shared memory");
  const WorkerTraffic &busy = metrics.traffic[0], &idle = metrics.traffic[1];
  EXPECT_EQ(busy.worker, "w1");
  EXPECT_EQ(idle.worker, "w2");
  EXPECT_GT(busy.bytes_sent + busy.bytes_by_handle, 60U << 20);
  EXPECT_GT(busy.bytes_on_the_way, 50U << 20) << "nobody has used them";
  EXPECT_GT(busy.messages_queued, 0U) << "the window is full";
  EXPECT_GT(busy.bytes_queued, busy.messages_queued);
  EXPECT_LT(idle.bytes_sent, 100'000U);
  EXPECT_EQ(idle.bytes_queued + idle.messages_queued, 0U);
  EXPECT_EQ(metrics.bytes_sent, busy.bytes_sent + idle.bytes_sent);
  EXPECT_EQ(metrics.bytes_by_handle, busy.bytes_by_handle + idle.bytes_by_handle);
  EXPECT_EQ(metrics.bytes_received, busy.bytes_received + idle.bytes_received);
  gate.open();
  for (Future<void>& call : calls) call.get();
  EXPECT_TRUE(comes_true([&] { return job[0].metrics().traffic[0].bytes_queued == 0; }));
  job.shutdown();
}

TEST(AgentMetricsTest, ReferencesSayWhereTheyComeFrom) {
  Job job(2);
  {
    const RRef<at::Tensor> there = job[0].remote<&make_counted>("w1", 2),
                           here = job[0].make_rref(at::ones({3}));
    EXPECT_EQ(there.to_here().numel(), 2);
    job[0].rpc_sync<&keep_counted>("w1", here);
    const AgentMetrics of_0 = job[0].metrics();
    EXPECT_EQ(of_0.rrefs.size(), 2U);
    EXPECT_EQ(count_of(of_0.rrefs, " of w1, made at "), 1) << to_string(of_0);
    EXPECT_EQ(count_of(of_0.rrefs, " by make_counted"), 1) << to_string(of_0);
    EXPECT_EQ(count_of(of_0.rrefs, " of w0, made at "), 1) << to_string(of_0);
    EXPECT_EQ(count_of(of_0.rrefs, "agent_metrics_test.cpp:"), 2) << to_string(of_0);
    EXPECT_TRUE(comes_true([&] {
      const std::vector<std::string> rrefs = job[1].metrics().rrefs;
      return rrefs.size() == 1 && count_of(rrefs, " of w0, sent by w0") == 1;
    })) << to_string(job[1].metrics());
    counted_on_w1 = {};
  }
  EXPECT_TRUE(comes_true([&] { return job[0].metrics().rrefs.size() + job[1].metrics().rrefs.size() == 0; }));
  job.shutdown();
}

TEST(AgentMetricsTest, BackwardsThatRunAreCounted) {
  Job job(3);
  test::Gate gate;
  gate_of_counted = &gate;
  const at::Tensor x = at::ones({2}).requires_grad_();
  dist_autograd::Context context(job[0]);
  const at::Tensor y = job[0].rpc_sync<twice_counted>("w1", x);
  EXPECT_EQ(job[0].metrics().backwards + job[1].metrics().backwards, 0U);
  std::thread during_backward([&] {
    EXPECT_TRUE(comes_true([&] { return job[1].metrics().backwards == 1; }));
    EXPECT_EQ(job[0].metrics().backwards, 1U);
    EXPECT_EQ(job[2].metrics().backwards, 0U) << "it has no part in it";
    gate.open();
  });
  dist_autograd::backward(context, {y.sum()});
  during_backward.join();
  EXPECT_EQ(job[0].metrics().backwards + job[1].metrics().backwards, 0U);
  EXPECT_EQ(job[0].metrics().contexts, 1U);
  EXPECT_TRUE(at::equal(dist_autograd::get_gradients(context).at(0).second, at::full({2}, 2.)));
  job.shutdown();
}

TEST(AgentMetricsTest, AsTextTheyHaveALineForEachWorkerAndFunction) {
  AgentMetrics metrics;
  metrics.calls_made = 1200;
  metrics.calls_made_per_second = 1234.56;
  metrics.calls_pending = 3;
  metrics.calls_handled = 40;
  metrics.calls_unanswered = 5;
  metrics.handlers_queued = 2;
  metrics.handlers_on_threads = 1;
  metrics.functions.push_back({"embed", 1200, 3, nanoseconds(97'300), milliseconds(2), seconds(1500)});
  metrics.traffic.push_back({"ps/0", "TCP", 12'300'000, 999, 0, 4'000'000'000'000'000, 7, 65'000});
  metrics.shared_bytes_in_use = 4'000'000;
  metrics.contexts = 1;
  metrics.backwards = 2;
  metrics.references = 4;
  metrics.rrefs = {"object 0.1 of ps/0, made at main.cpp:12 by embed"};
  metrics.objects = {"object 1.1, made at main.cpp:13, held by ps/0"};
  EXPECT_EQ(
      to_string(metrics),
      "calls made: 1200, 1234.6 a second, 3 pending\n"
      "calls handled: 40, 0.0 a second, 5 unanswered, 2 queued, 1 on threads\n"
      "ps/0 over TCP: sent 12.3 MB, received 999.0 B, on the way 0.0 B, queued 4000.0 TB in 7 messages, by "
      "handle 65.0 kB\n"
      "shared memory: 4.0 MB in use, 0.0 B cached\n"
      "embed: 1200 calls, 3 errors, p50 97.3 us, p99 2.0 ms, max 1500.0 s\n"
      "1 contexts, 2 backwards, 4 references, 1 objects\n"
      "reference to object 0.1 of ps/0, made at main.cpp:12 by embed\n"
      "object 1.1, made at main.cpp:13, held by ps/0");
}

TEST(AgentMetricsTest, TheTransportOfEachPairIsNamed) {
  AgentOptions options;
  options.listen = "127.0.0.1:0";
  Job job(2, options);
  EXPECT_EQ(job[0].metrics().traffic.at(0).transport, "TCP");
  EXPECT_EQ(describe_transports(job[1].metrics().traffic), "1 worker over TCP (w0)");
  job.shutdown();
  const test::LogLines log;
  Job on_one_host(2);  // auto
  EXPECT_EQ(log.count(" reaches "), 2U) << log.text();
  EXPECT_EQ(log.count("w0 reaches 1 worker over shared memory (w1)"), 1U) << log.text();
  EXPECT_EQ(log.count("w1 reaches 1 worker over shared memory (w0)"), 1U) << log.text();
  on_one_host.shutdown();
  std::vector<WorkerTraffic> traffic(12);
  for (std::size_t i = 0; i < traffic.size(); ++i) {
    traffic[i].worker = base::concat('w', i);
    traffic[i].transport = i < 10 ? "shared memory" : "TCP";
  }
  EXPECT_EQ(describe_transports(traffic),
            "2 workers over TCP (w10, w11), 10 over shared memory (w0, w1, w2, w3, w4, w5, w6, w7, ...)");
}

TEST(MetricsChild, DISABLED_Rank) {
  COHORT_EXPECT_THROW_WITH(metrics(), UsageError, "this process has no agent");
  const std::string rank = std::getenv("RANK"), next = rank == "0" ? "rank/1" : "rank/0";
  init_rpc("rank/" + rank);
  EXPECT_EQ(rpc_sync<make_counted>(next, 5).numel(), 5);
  EXPECT_EQ(metrics().calls_made, 1U);
  ASSERT_EQ(metrics().traffic.size(), 1U);
  EXPECT_EQ(metrics().traffic[0].worker, next);
  EXPECT_GT(metrics().traffic[0].bytes_received, 20U);
  shutdown();
}

TEST(AgentMetricsTest, AProcessHasThoseOfItsAgent) {
  test::RankProcesses ranks("MetricsChild", 2);
  EXPECT_EQ(ranks.wait(), (std::vector<int>{0, 0})) << ranks.output(0) << ranks.output(1);
}

}  // namespace
}  // namespace cohort::rpc

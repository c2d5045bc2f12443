#include "cohort/rpc/internal/telemetry/call_trace.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cohort/base/timeline.h"
#include "cohort/comm/init.h"
#include "cohort/comm/trace.h"
#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/init.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"
#include "tests/support/processes.h"

namespace cohort::rpc {
namespace {

using base::Timeline;
using nlohmann::json;
using std::chrono::milliseconds;

at::Tensor traced_product(const at::Tensor& x, const at::Tensor& y) {
  return x * y;
}
test::Gate* gate_of_traced = nullptr;
void traced_wait() {
  gate_of_traced->wait();
}
at::Tensor traced_ones(std::int64_t size) {
  return at::ones({size});
}
COHORT_REMOTE(traced_product);
COHORT_REMOTE(traced_wait);
COHORT_REMOTE(traced_ones);

double number_of(const json& event, const char* key) {
  return event.at(key).get<double>();
}

// The name of the innermost span that a point of an arrow lies in; empty where there is none.
std::string span_around(const json& trace, const json& point) {
  json found;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X" || event.at("pid") != point.at("pid") || event.at("tid") != point.at("tid"))
      continue;
    const double begin = number_of(event, "ts"), time = number_of(point, "ts");
    if (time < begin || time > begin + number_of(event, "dur")) continue;
    if (found.is_null() || begin >= number_of(found, "ts")) found = event;
  }
  return found.is_null() ? "" : found.at("name").get<std::string>();
}

// Of each arrow its points in time: "s call on w1, t handler", or "0:s call on w1, 1:t handler". Sorted.
std::vector<std::string> arrows_of(const json& trace, bool with_process = false) {
  std::map<std::string, std::vector<json>> by_id;
  for (const json& event : trace.at("traceEvents")) {
    if (event.contains("cat") && event.at("cat") == "arrow")
      by_id[event.at("id").get<std::string>()].push_back(event);
  }
  std::vector<std::string> arrows;
  for (auto& [id, points] : by_id) {
    std::stable_sort(points.begin(), points.end(),
                     [](const json& a, const json& b) { return number_of(a, "ts") < number_of(b, "ts"); });
    std::string text;
    for (const json& point : points) {
      if (!text.empty()) text += ", ";
      if (with_process) text += std::to_string(point.at("pid").get<int>()) + ":";
      text += point.at("ph").get<std::string>() + " " + span_around(trace, point);
    }
    arrows.push_back(text);
  }
  std::sort(arrows.begin(), arrows.end());
  return arrows;
}

// Handlers' spans end after their answers.
json trace_of_all(test::Job& job, std::size_t size) {
  for (std::size_t id = 0; id < size; ++id) {
    test::wait_until([&] { return job[id].metrics().handlers_on_threads == 0; });
  }
  Timeline::stop();
  return json::parse(Timeline::json());
}

TEST(CallTraceTest, ArrowsLeadFromCallsToHandlersAndGradients) {
  test::Job job(2);
  Timeline::start();
  job[0].rpc_sync<traced_ones>("w1", 1);
  EXPECT_EQ(job[0].remote<&traced_ones>("w1", 2).to_here().numel(), 2);
  {
    const at::Tensor x = at::ones({2}).requires_grad_();
    dist_autograd::Context context(job[0]);
    const at::Tensor loss = job[0].rpc_sync<traced_product>("w1", x, x).sum();
    dist_autograd::backward(context, {loss}, {.keep_graph = true});
    dist_autograd::backward(context, {loss});
  }
  const json trace = trace_of_all(job, 2);
  const std::string part = "s rpc::backward_part on w1, f rpc::backward_part";
  EXPECT_EQ(arrows_of(trace),
            (std::vector<std::string>{
                part, part, "s rpc::fetch on w1, f rpc::fetch", "s traced_ones on w1, f traced_ones",
                "s traced_ones on w1, f traced_ones",
                "s traced_product on w1, t traced_product, t rpc::backward_part, f rpc::backward_part"}));
  int num_backwards = 0;
  for (const json& event : trace.at("traceEvents")) num_backwards += event.at("name") == "rpc::backward";
  EXPECT_EQ(num_backwards, 2);
  job.shutdown();
}

TEST(CallTraceTest, CallsThatOverlapHaveRowsOfTheirOwn) {
  test::Job job(2);
  test::Gate gate;
  gate_of_traced = &gate;
  Timeline::start();
  std::vector<Future<void>> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(job[0].rpc_async<traced_wait>("w1"));
  job[0].rpc_sync<traced_ones>("w1", 1);
  job[0].rpc_sync<traced_ones>("w1", 1);
  gate.open();
  for (Future<void>& call : calls) call.get();
  job[0].rpc_sync<traced_ones>("w1", 1);
  const json trace = trace_of_all(job, 2);
  std::map<int, std::string> rows;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("name") == "thread_name") rows[event.at("tid")] = event.at("args").at("name");
  }
  std::map<std::string, std::vector<json>> spans;  // by row
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    const std::string row = rows[event.at("tid")];
    if (row.starts_with("calls of w0")) spans[row].push_back(event);
  }
  std::size_t num_spans = 0;
  for (auto& [row, of_row] : spans) {
    num_spans += of_row.size();
    std::sort(of_row.begin(), of_row.end(),
              [](const json& a, const json& b) { return number_of(a, "ts") < number_of(b, "ts"); });
    for (std::size_t i = 1; i < of_row.size(); ++i) {
      EXPECT_GE(number_of(of_row[i], "ts"), number_of(of_row[i - 1], "ts") + number_of(of_row[i - 1], "dur"))
          << row;
    }
  }
  EXPECT_EQ(num_spans, 6U);
  ASSERT_EQ(spans.size(), 4U) << "three that wait, and those that come one after the other";
  EXPECT_EQ(spans.begin()->first, "calls of w0");
  EXPECT_EQ(std::next(spans.begin())->first, "calls of w0 (2)");
  job.shutdown();
}

std::vector<double> counter_values(const json& trace, const std::string& counter) {
  std::vector<double> values;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("ph") == "C" && event.at("name") == counter)
      values.push_back(number_of(event.at("args"), "value"));
  }
  return values;
}

TEST(CallTraceTest, CountersShowWhatIsUnderWayAtMostTenTimesASecond) {
  test::Job job(2);
  test::Gate gate;
  gate_of_traced = &gate;
  const RRef<at::Tensor> object = job[0].make_rref(at::ones({1}));
  Timeline::start();
  const auto begin = Timeline::Clock::now();
  Future<void> call = job[0].rpc_async<traced_wait>("w1");
  for (int i = 0; i < 200; ++i) job[0].rpc_sync<traced_ones>("w1", 1);
  gate.open();
  call.get();
  const json trace = trace_of_all(job, 2);
  const std::chrono::duration<double> seconds = Timeline::Clock::now() - begin;
  const std::vector<double> pending = counter_values(trace, "pending calls of w0");
  ASSERT_FALSE(pending.empty());
  EXPECT_EQ(pending.front(), 1) << "it was recorded as the call began";
  EXPECT_LE(static_cast<double>(pending.size()), 1 + 10 * seconds.count());
  EXPECT_EQ(counter_values(trace, "references of w0").front(), 1);
  EXPECT_EQ(counter_values(trace, "bytes on the way of w0").size(), pending.size());
  job.shutdown();
}

TEST(CallTraceTest, NothingIsRecordedWhileTheTimelineIsStopped) {
  Timeline::start();
  Timeline::stop();
  CallTrace trace("w0");
  trace.add("traced_ones", "w1", 1, CallTrace::Time::clock::now());
  { const HandlerTrace handler("traced_ones", "w0", 1, true); }
  { const MakeTrace make("traced_ones", "w0", "w1", 2); }
  trace_gradient("w0", 1, true);
  for (const json& event : json::parse(Timeline::json()).at("traceEvents")) EXPECT_EQ(event.at("ph"), "M");
}

TEST(CallTraceChild, DISABLED_Rank) {
  const comm::Group group =
      comm::init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(40)});
  init_rpc("w" + std::to_string(group.rank()), {.agent = {}, .group = group});
  Timeline::start();
  group.barrier();
  if (group.rank() == 0) {
    const at::Tensor x = at::ones({2}).requires_grad_();
    dist_autograd::Context context;
    dist_autograd::backward(context, {rpc_sync<traced_product>("w1", x, x).sum()});
  }
  group.barrier();
  test::wait_until([] { return metrics().handlers_on_threads == 0; });
  Timeline::stop();
  comm::write_trace(group, std::string(std::getenv("TEST_FOLDER")) + "/trace.json");
  shutdown();
}

TEST(CallTraceTest, TheTraceOfAllRanksHasTheArrowsBetweenThem) {
  test::RankProcesses ranks("CallTraceChild", 2);
  ASSERT_EQ(ranks.wait(), (std::vector<int>{0, 0})) << ranks.output(0) << ranks.output(1);
  const json trace = json::parse(test::read_file(ranks.folder() / "trace.json"));
  EXPECT_EQ(
      arrows_of(trace, true),
      (std::vector<std::string>{"0:s rpc::backward_part on w1, 1:f rpc::backward_part",
                                "0:s traced_product on w1, 1:t traced_product, 1:f rpc::backward_part"}));
}

}  // namespace
}  // namespace cohort::rpc

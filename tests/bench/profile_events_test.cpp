#include "cohort/bench/internal/profile_events.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cohort/base/timeline.h"

namespace cohort::bench::detail {
namespace {

using namespace std::chrono_literals;

/// An operator that calls another, each of which starts work on a GPU, and work that nobody started.
std::vector<Event> recorded() {
  std::vector<Event> events{
      {.begin = 5200, .end = 9200, .row = 7, .gpu = 0, .name = "gemm", .started_by = 12},
      {.begin = 9200, .end = 9700, .row = 7, .gpu = 0, .name = "add", .started_by = 11},
      {.begin = 6000, .end = 6250, .row = 9, .gpu = 0, .name = "Memcpy HtoD", .started_by = 99},
      {.begin = 2000, .end = 4000, .row = 100, .name = "aten::addmm", .id = 12},
      {.begin = 1000, .end = 5000, .row = 100, .name = "aten::linear", .id = 11},
      {.begin = 2500, .end = 2600, .row = 100, .name = "cudaLaunchKernel"},
      {.begin = 1000, .end = 1300, .row = 200, .name = "aten::neg", .id = 13},
  };
  sort(events);
  return events;
}

TEST(ProfileEventsTest, SortsCallsBeforeWhatTheyCalledAndThreadsBeforeGpus) {
  std::string order;
  for (const Event& event : recorded()) order += event.name + " ";
  EXPECT_EQ(order, "aten::linear aten::addmm cudaLaunchKernel aten::neg gemm add Memcpy HtoD ");
}

TEST(ProfileEventsTest, WorkOnAGpuCountsForTheOperatorThatStartedIt) {
  const std::vector<OperatorRow> rows = rows_of(recorded());
  const auto row = [&](const std::string& name) {
    for (const OperatorRow& candidate : rows) {
      if (candidate.name == name) return candidate;
    }
    ADD_FAILURE() << "no row " << name;
    return OperatorRow();
  };
  EXPECT_EQ(rows.size(), 5u);
  EXPECT_EQ(rows.front().name, "aten::addmm");  // the most time on the GPU
  EXPECT_EQ(row("aten::addmm").gpu, 4us);
  EXPECT_EQ(row("aten::addmm").self, 1900ns);
  EXPECT_EQ(row("aten::linear").gpu, 500ns);  // its own, without addmm's
  EXPECT_EQ(row("aten::linear").self, 2us);
  EXPECT_EQ(row("aten::linear").total, 4us);
  EXPECT_EQ(row("(started by no operator)").gpu, 250ns);
  EXPECT_EQ(row("(started by no operator)").calls, 0);
  EXPECT_EQ(row("cudaLaunchKernel").gpu, 0ns);
  EXPECT_EQ(row("aten::neg").gpu, 0ns);
}

TEST(ProfileEventsTest, TheTableHasAColumnForGpusWhereThereIsWorkOnThem) {
  const std::vector<OperatorRow> rows = rows_of(recorded());
  const std::string table = table_of(rows, 2, 10us, 2);
  EXPECT_NE(table.find("one call         GPU\n"), std::string::npos) << table;
  EXPECT_NE(table.find("  2.000 us\n"), std::string::npos) << table;  // addmm's, per step
  EXPECT_NE(table.find("3 more operators: 2 calls, 200.0 ns of their own, 125.0 ns on GPUs\n"),
            std::string::npos)
      << table;
  EXPECT_NE(table.find("2.375 us of work on GPUs\n"), std::string::npos) << table;

  std::vector<Event> without;
  for (const Event& event : recorded()) {
    if (event.gpu < 0) without.push_back(event);
  }
  EXPECT_EQ(table_of(rows_of(without), 1, 10us, 2).find("GPU"), std::string::npos);
}

TEST(ProfileEventsTest, ThreadsAndStreamsHaveRowsOfTheirOwn) {
  const auto trace = nlohmann::json::parse("[{}" + trace_of(recorded(), 1000) + "]");
  std::map<std::int64_t, std::string> names;
  std::map<std::int64_t, std::int64_t> places;
  for (const auto& event : trace) {
    if (!event.contains("ph") || event.at("ph") != "M") continue;
    if (event.at("name") == "thread_name") names[event.at("tid")] = event.at("args").at("name");
    if (event.at("name") == "thread_sort_index") places[event.at("tid")] = event.at("args").at("sort_index");
  }
  std::map<std::string, std::string> rows;
  for (const auto& event : trace) {
    if (!event.contains("ph") || event.at("ph") != "X") continue;
    rows[event.at("name")] = names.at(event.at("tid"));
    EXPECT_EQ(event.at("cat"), rows[event.at("name")].starts_with("GPU") ? "gpu" : "operator");
    if (event.at("name") == "gemm") {
      EXPECT_DOUBLE_EQ(event.at("ts"), 4.2);
      EXPECT_DOUBLE_EQ(event.at("dur"), 4);
    }
  }
  EXPECT_EQ(rows.at("aten::addmm"), "operators of thread 100");
  EXPECT_EQ(rows.at("aten::neg"), "operators of thread 200");
  EXPECT_EQ(rows.at("gemm"), "GPU 0, stream 7");
  EXPECT_EQ(rows.at("Memcpy HtoD"), "GPU 0, stream 9");
  // The timeline's row of a thread, then its operators, then the next thread; GPUs last.
  for (const auto& [tid, name] : names) {
    const bool on_gpu = name.starts_with("GPU");
    const std::int64_t thread = name.ends_with("100") ? 100 : 200;
    EXPECT_TRUE(on_gpu ? places.at(tid) > places.at(200) + 1 : places.at(tid) == places.at(thread) + 1)
        << name;
  }
  EXPECT_LT(places.at(100) + 1, places.at(200));
}

}  // namespace
}  // namespace cohort::bench::detail

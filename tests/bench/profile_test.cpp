#include "cohort/bench/profile.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/timeline.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::bench {
namespace {

const OperatorRow* find(const Profile& profile, const std::string& name) {
  for (const OperatorRow& row : profile.operators()) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

struct ProfileTest : ::testing::Test {
  void step() {
    const base::TimelineScope scope("our scope");
    const at::Tensor y = at::linear(x, weight).relu();
    y.sum().backward();
  }
  at::Tensor x = at::ones({8, 16});
  at::Tensor weight = at::ones({4, 16}).requires_grad_();
};

TEST_F(ProfileTest, CountsTheOperatorsOfTheRecordedStepsOnly) {
  int calls = 0;
  const Profile profile = bench::profile([&] { ++calls, step(); }, ProfileOptions().warm_up(2).steps(3));
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(profile.steps(), 3);
  ASSERT_NE(find(profile, "aten::relu"), nullptr) << profile.table(100);
  EXPECT_EQ(find(profile, "aten::relu")->calls, 3);
  EXPECT_EQ(find(profile, "aten::linear")->calls, 3);
  ASSERT_NE(find(profile, "ReluBackward0"), nullptr) << profile.table(100);
  EXPECT_EQ(find(profile, "ReluBackward0")->calls, 3);
}

TEST_F(ProfileTest, TimeOfItsOwnIsTimeWithoutWhatItCalled) {
  const Profile profile = bench::profile([&] { step(); }, ProfileOptions().steps(2));
  std::chrono::nanoseconds all{0};
  for (const OperatorRow& row : profile.operators()) {
    EXPECT_GE(row.self.count(), 0) << row.name;
    EXPECT_LE(row.self, row.total) << row.name;
    all += row.self;
  }
  EXPECT_GT(all.count(), 0);
  EXPECT_LE(all, profile.wall());
  const OperatorRow* linear = find(profile, "aten::linear");
  ASSERT_NE(linear, nullptr);
  EXPECT_LT(linear->self, linear->total);  // it calls addmm or matmul
  EXPECT_GE(profile.operators().front().self, profile.operators().back().self);
}

TEST_F(ProfileTest, TheTableNamesTheFirstOperatorsAndSumsUpTheRest) {
  const Profile profile = bench::profile([&] { step(); });
  const std::string table = profile.table(2);
  EXPECT_NE(table.find(profile.operators()[1].name), std::string::npos) << table;
  EXPECT_NE(table.find(std::to_string(profile.operators().size() - 2) + " more operators"), std::string::npos)
      << table;
  EXPECT_NE(table.find("1 step, "), std::string::npos) << table;
}

TEST_F(ProfileTest, ShapesSplitRows) {
  const auto work = [&] { x.neg(), weight.neg(); };
  EXPECT_EQ(find(bench::profile(work), "aten::neg")->calls, 2);
  const Profile profile = bench::profile(work, ProfileOptions().shapes(true));
  int rows = 0;
  for (const OperatorRow& row : profile.operators()) {
    if (row.name != "aten::neg") continue;
    ++rows;
    EXPECT_EQ(row.calls, 1);
    EXPECT_TRUE(row.shapes.find("[8, 16]") != std::string::npos ||
                row.shapes.find("[4, 16]") != std::string::npos)
        << row.shapes;
  }
  EXPECT_EQ(rows, 2);
}

TEST_F(ProfileTest, TheTraceHoldsTheTimelineAndTheOperatorsWithinIt) {
  test::TempDir dir;
  bench::profile([&] { step(); }, ProfileOptions().steps(2)).write_trace(dir / "trace.json");
  const nlohmann::json trace = nlohmann::json::parse(test::read_file(dir / "trace.json"));
  EXPECT_FALSE(base::Timeline::enabled());
  double begin = 0, end = 0;
  int scopes = 0, relus = 0;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("name") != "our scope") continue;
    ++scopes;
    begin = scopes == 1 ? event.at("ts").get<double>() : begin;
    end = event.at("ts").get<double>() + event.at("dur").get<double>();
  }
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("name") != "aten::relu") continue;
    ++relus;
    EXPECT_EQ(event.at("cat"), "operator");
    // Two clocks, told from one moment: an operator may stand a little beside its scope, not elsewhere.
    EXPECT_GT(event.at("ts").get<double>(), begin - 1000);
    EXPECT_LT(event.at("ts").get<double>() + event.at("dur").get<double>(), end + 1000);
  }
  EXPECT_EQ(scopes, 2);
  EXPECT_EQ(relus, 2);
}

TEST_F(ProfileTest, SeesOperatorsOfOtherThreads) {
  const Profile profile = bench::profile([&] {
    std::thread other([&] { x.neg(); });
    other.join();
  });
  ASSERT_NE(find(profile, "aten::neg"), nullptr) << profile.table(100);
}

TEST_F(ProfileTest, ATimelineThatRecordsContinues) {
  base::Timeline::start();
  base::Timeline::instant("before");
  const Profile profile = bench::profile([&] { step(); });
  EXPECT_TRUE(base::Timeline::enabled());
  base::Timeline::stop();
  EXPECT_NE(profile.trace().find("\"before\""), std::string::npos);
  EXPECT_NO_THROW((void)nlohmann::json::parse(profile.trace()));
}

TEST_F(ProfileTest, AnExceptionEndsTheRecording) {
  EXPECT_THROW(bench::profile([] { throw std::runtime_error("no"); }), std::runtime_error);
  EXPECT_THROW(bench::profile([n = 0]() mutable {
                 if (++n > 3) throw std::runtime_error("while recording");
               }),
               std::runtime_error);
  EXPECT_FALSE(base::Timeline::enabled());
  EXPECT_NO_THROW(bench::profile([&] { step(); }));
}

TEST_F(ProfileTest, RejectsASecondProfilerAndNoSteps) {
  Profiler first;
  COHORT_EXPECT_THROW_WITH(Profiler(), UsageError,
                           "[bench.profile] a profiler of LibTorch is running already");
  COHORT_EXPECT_THROW_WITH(first.stop(0), UsageError, "got 0 steps");
  first.stop();
  COHORT_EXPECT_THROW_WITH(first.stop(), UsageError, "called twice");
  COHORT_EXPECT_THROW_WITH(bench::profile([] {}, ProfileOptions().steps(0)), UsageError, "0 to record");
}

}  // namespace
}  // namespace cohort::bench

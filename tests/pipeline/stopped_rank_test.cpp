// A rank of a pipeline that stands still (SIGSTOP) within a step: the other's error comes in time and names
// it.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "cohort/base/error.h"
#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "tests/pipeline/nets.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/processes.h"

namespace cohort::pipeline {
namespace {

using namespace test;
using cohort::test::deadline_slack;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kTime(600);

TEST(StoppedRankChild, DISABLED_Rank) {
  const int stopped = std::atoi(std::getenv("TEST_STOPPED")), at = std::atoi(std::getenv("TEST_ACTION"));
  comm::Group group =
      comm::init_process_group({.backend = std::getenv("TEST_BACKEND"), .timeout = seconds(40)});
  auto model = mlp();
  auto stages = cut(model, {3});
  stages[static_cast<std::size_t>(1 - group.rank())] = Stage::remote();
  std::atomic<int> actions{-1};  // of the step that is to be late
  PipelineOptions options;
  options.placements = placements(2);
  options.split_size = 3;
  options.schedule = Schedule::kOneFOneB;
  options.timeout = seconds(20);
  options.group = group;
  options.on_action = [&](const Action&) {
    if (group.rank() == stopped && actions >= 0 && actions++ == at) ::raise(SIGSTOP);
  };
  const at::Tensor input = torch::randn({11, 10}), target = torch::randn({11, 5});
  {
    Pipeline warm(stages, options);
    warm.step(input, target, mse);
  }
  options.timeout = kTime;
  Pipeline pipe(stages, options);
  group.barrier();
  actions = 0;
  const base::Deadline waited(kTime);
  try {
    pipe.step(input, target, mse);
    ADD_FAILURE() << "the step came to an end";
  } catch (const Error& error) {
    EXPECT_LT(waited.elapsed(), kTime + deadline_slack()) << error.what();
    // The store goes silent with rank 0, which keeps it.
    const std::string text = error.what(), name = base::concat("rank ", stopped);
    const bool is_store = stopped == 0 && text.find("store") != std::string::npos;
    EXPECT_TRUE(is_store || text.find(name) != std::string::npos) << text;
  }
  std::fprintf(stderr, "has seen all\n");
  std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
}

struct StoppedCase {
  const char* backend;
  int stopped;
  int action;  // before which it stops
};

class StoppedRankTest : public ::testing::TestWithParam<StoppedCase> {};

TEST_P(StoppedRankTest, TheStepEndsAtItsDeadlineAndNamesIt) {
  const auto [backend, stopped, action] = GetParam();
  cohort::test::RankProcesses ranks("StoppedRankChild", 2,
                                    {{"TEST_BACKEND", backend},
                                     {"TEST_STOPPED", std::to_string(stopped)},
                                     {"TEST_ACTION", std::to_string(action)}});
  const int other = 1 - stopped;
  ranks.wait_for(other, "has seen all");
  EXPECT_EQ(ranks.output(other).find("Failure"), std::string::npos) << ranks.output(other);
}

INSTANTIATE_TEST_SUITE_P(All, StoppedRankTest,
                         ::testing::Values(StoppedCase{"shm", 1, 0}, StoppedCase{"shm", 0, 3},
                                           StoppedCase{"gloo", 1, 2}),
                         [](const auto& info) {
                           const StoppedCase& each = info.param;
                           return base::concat(each.backend, "_rank", each.stopped, "_action", each.action);
                         });

}  // namespace
}  // namespace cohort::pipeline

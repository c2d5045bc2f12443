// How a run of `cohort run --elastic` ends for its nodes: by a signal, by failures, by ranks that cannot
// begin.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <string>

#include "cohort/base/error.h"
#include "tests/cli/run/run_elastic.h"
#include "tests/support/comes_true.h"
#include "tests/support/messages.h"

namespace cohort::test {
namespace {

using base::concat;

TEST_F(RunElasticTest, ASignalToTheNodeThatHasTheRecordEndsTheRun) {
  Job first = node("1:2");
  ASSERT_NE(process_in(1, 0, 1), 0);
  Job second = node("1:2");
  ASSERT_NE(process_in(2, 1, 2), 0);
  first.worker().signal(SIGTERM);
  EXPECT_EQ(first.wait(), 143) << first.err();
  EXPECT_NE(second.wait(), 0);
  expect_in(second.err(), {"leaves, and it has the run's only record"});
}

// The run waits for another node, and only this one has its state.
TEST_F(RunElasticTest, ANodeThatLeavesWhileTheRunFormsGivesItsStateToTheNextOne) {
  const auto start = [&](int local_ranks) {
    return node("2:2",
                {"--virtual-ranks=4", "--monitor-interval=0.02", concat("--nproc-per-node=", local_ranks)});
  };
  // The agent at the endpoint must stay. Its second rank begins late, so it has not the state.
  write_file(dir / "hang_1", "");
  Job endpoint_agent = start(2);
  ASSERT_TRUE(comes(dir / "pid_1"));
  Job leaver = start(1), victim = start(1);
  ASSERT_TRUE(logs(leaver, "generation 1: the run begins; rebuild ")) << leaver.err();
  victim.worker().signal(SIGKILL);
  ASSERT_TRUE(logs(leaver, " died")) << leaver.err();
  leaver.worker().signal(SIGTERM);
  ASSERT_TRUE(logs(leaver, ": this node leaves the run")) << leaver.err();
  std::filesystem::remove(dir / "hang_1");
  ASSERT_TRUE(comes(dir / "in_2_0_of_3")) << endpoint_agent.err();
  EXPECT_EQ(leaver.wait(), 143) << leaver.err();
  Job next = start(1);
  ASSERT_TRUE(comes(dir / "in_3_0_of_3")) << endpoint_agent.err();
  let_end();
  EXPECT_EQ(endpoint_agent.wait(), 0) << endpoint_agent.err();
  EXPECT_EQ(next.wait(), 0) << next.err();
}

// A spare node has nothing to save, and no reason to say that the run has succeeded.
TEST_F(RunElasticTest, ARunThatASignalHasStoppedHasSucceededForNobody) {
  Job first = node("1:1", {"--spares=1"});
  ASSERT_NE(process_in(1, 0, 1), 0);
  Job second = node("1:1", {"--spares=1"});
  ASSERT_TRUE(logs(second, "is a spare of")) << second.err();
  write_file(dir / "stopped", "");
  let_end();
  EXPECT_EQ(first.wait(), 143) << first.err();
  EXPECT_EQ(second.wait(), 143) << second.err();
  for (const Job* job : {&first, &second}) {
    expect_in(job->err(), {"signal 15 (Terminated) has stopped the run; the same command resumes it"});
  }
}

TEST_F(RunElasticTest, WhenNoRestartIsLeftTheRunEndsForAll) {
  Job first = node("2:2", {"--max-restarts=0"});
  ASSERT_TRUE(logs(first, "this node waits for nodes"));
  Job second = node("2:2", {"--max-restarts=0"});
  const pid_t victim = process_in(1, 1, 2);
  ASSERT_NE(victim, 0);
  ASSERT_NE(process_in(1, 0, 2), 0);
  ::kill(victim, SIGKILL);
  EXPECT_EQ(first.wait(), 137);
  EXPECT_EQ(second.wait(), 137);
  for (const Job* job : {&first, &second}) expect_in(job->err(), {"(0 restarts used of 0)"});
}

// Without --max-restarts: failures of one place in a row count, until a step is made.
TEST_F(RunElasticTest, ARankMayFailAsOftenAsStepsAreMadeBetween) {
  Job job = agent({"--standalone", "--nproc-per-node=2"});
  for (int generation = 1; generation <= 6; ++generation) {
    const pid_t rank = process_in(generation, 1, 2);
    ASSERT_NE(rank, 0) << job.err();
    ASSERT_TRUE(comes(dir / concat("stepped_", generation, "_1"))) << job.err();
    if (generation < 6) ::kill(rank, SIGKILL);
  }
  let_end();
  EXPECT_EQ(job.wait(), 0) << job.err();
}

TEST_F(RunElasticTest, ARankThatFailsAgainAndAgainEndsTheRunWithoutALimitToo) {
  Job job = agent({"--standalone", "--nproc-per-node=1"}, {"no such model"});
  EXPECT_EQ(job.wait(), 5);
  expect_in(job.err(), {"local rank 0 has failed 4 times in a row, and no step was made between"});
}

TEST_F(RunElasticTest, ARankThatCannotBeginEndsItsNode) {
  Job job =
      agent({"--nnodes=2:2", "--rdzv-endpoint=127.0.0.1:" + port, "--max-restarts=1"}, {"no such model"});
  EXPECT_EQ(job.wait(), 5);
  expect_in(job.err(), {"it ended with status 5", "no such model"});
}

}  // namespace
}  // namespace cohort::test

// `cohort train` as ranks that a real mpirun has started, over shm, gloo and mpi.
#include "tests/support/processes/mpirun.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tests/cli/program.h"
#include "tests/support/throws.h"

namespace cohort::test {
namespace {

using namespace std::chrono_literals;

class MpirunTest : public TrainProgramTest {
 protected:
  MpiJob start(int ranks, const std::string& folder, const std::vector<std::string>& more = {}) {
    std::vector<std::string> command = train(folder, more);
    command.insert(command.begin(), COHORT_PROGRAM);
    return MpiJob(dir.path(), ranks, command, {{"OMP_NUM_THREADS", "1"}});
  }
  void train_under_mpirun(int ranks, const std::string& folder, const std::vector<std::string>& more = {}) {
    MpiJob job = start(ranks, folder, more);
    ASSERT_EQ(job.wait(), 0) << job.output();
    EXPECT_TRUE(message_contains(job.output(), std::to_string(ranks) + " ranks (ddp)"));
  }
  // The process of rank 1, once its run has a checkpoint.
  pid_t rank_1(MpiJob& job, const std::string& folder) {
    while (!std::filesystem::exists(dir / folder / "checkpoints" / "last") && !job.worker().reap()) {
      std::this_thread::sleep_for(10ms);
    }
    const std::string mpirun = std::to_string(job.worker().pid());
    std::istringstream children(read_file("/proc/" + mpirun + "/task/" + mpirun + "/children"));
    for (pid_t child = 0; children >> child;) {
      const std::string variables = '\0' + read_file("/proc/" + std::to_string(child) + "/environ");
      if (variables.find(std::string("\0OMPI_COMM_WORLD_RANK=1\0", 24)) != std::string::npos) return child;
    }
    ADD_FAILURE() << "mpirun has no rank 1:\n" << job.output();
    return -1;
  }
};

// Two numbers have one sum, so all backends end with the same bits.
TEST_F(MpirunTest, TheRunIsBitwiseTheSameAsUnderOurOwnLauncher) {
  const Outcome own = run(train("own", {"--nproc-per-node", "2"}));
  ASSERT_EQ(own.status, 0) << own.err;
  train_under_mpirun(2, "auto");
  EXPECT_TRUE(model("auto") == model("own"));
  for (const std::string backend : {"shm", "gloo", "mpi"}) {
    train_under_mpirun(2, backend, {"distributed.backend=" + backend});
    EXPECT_TRUE(model(backend) == model("own")) << backend;
  }
}

TEST_F(MpirunTest, OverMpiTwoRunsOfThreeRanksHoldTheSameBitsAndOneContinuesFromTheOther) {
  const std::vector<std::string> mpi{"distributed.backend=mpi"};
  train_under_mpirun(3, "one", mpi);
  train_under_mpirun(3, "two", {"distributed.backend=mpi", "train.max_steps=5"});
  train_under_mpirun(3, "two", {"distributed.backend=mpi", "--resume", "auto"});
  EXPECT_TRUE(model("one") == model("two"));
}

TEST_F(MpirunTest, ARankThatIsKilledEndsTheJob) {
  MpiJob job = start(2, "killed", {"distributed.backend=mpi", "train.epochs=5000"});
  ::kill(rank_1(job, "killed"), SIGKILL);
  EXPECT_EQ(job.wait(20s), 128 + SIGKILL) << job.output();
  EXPECT_TRUE(message_contains(job.output(), "rank 1"));
}

TEST_F(MpirunTest, ARankThatIsStuckEndsTheJobAtTheDeadlineByMpiAbort) {
  MpiJob job = start(2, "stuck", {"distributed.backend=mpi", "train.epochs=5000", "comm.timeout=5"});
  ::kill(rank_1(job, "stuck"), SIGSTOP);
  EXPECT_EQ(job.wait(30s), 1) << job.output();
  for (const char* words :
       {"(rank 0/2, ", "timed out after ", "rank 1 did not answer: dead, stopped, or not watching",
        "rank 1 of 2 did not notice: dead, or stuck", "MPI_Abort"}) {
    EXPECT_TRUE(message_contains(job.output(), words));
  }
}

TEST_F(MpirunTest, WithoutMpirunBackendMpiIsRejected) {
  const Outcome outcome = run(train("alone", {"--nproc-per-node", "2", "distributed.backend=mpi"}));
  EXPECT_EQ(outcome.status, 2) << outcome.err;
  EXPECT_TRUE(message_contains(outcome.err, "this process was not started by mpirun"));
}

}  // namespace
}  // namespace cohort::test

#include "cohort/comm/job.h"

#include <gtest/gtest.h>

#include <list>

#include "cohort/base/error.h"
#include "tests/support/environment.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

// The variables of one process, and none of another launcher's.
class JobTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "TORCHELASTIC_USE_AGENT_STORE",
                             "TORCHELASTIC_RESTART_COUNT",
                             "SLURM_PROCID",
                             "SLURM_NTASKS",
                             "SLURM_LOCALID",
                             "SLURM_NODEID",
                             "SLURM_STEP_ID",
                             "SLURM_JOB_ID",
                             "SLURM_STEP_NODELIST",
                             "SLURM_JOB_NODELIST",
                             "SLURM_STEP_TASKS_PER_NODE",
                             "SLURM_TASKS_PER_NODE",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMIX_NAMESPACE",
                             "OMPI_MCA_ess_base_jobid"}) {
      kept_.emplace_back(name, std::nullopt);
    }
  }
  void set(const std::string& name, const std::string& value) { kept_.emplace_back(name, value); }
  void set_slurm() {
    set("SLURM_PROCID", "3");
    set("SLURM_NTASKS", "5");
    set("SLURM_LOCALID", "1");
    set("SLURM_NODEID", "1");
    set("SLURM_STEP_ID", "0");
    set("SLURM_JOB_ID", "77");
    set("SLURM_STEP_NODELIST", "gpu[07-08]");
    set("SLURM_STEP_TASKS_PER_NODE", "2,3");
  }
  void TearDown() override {
    while (!kept_.empty()) kept_.pop_back();  // the last one first
  }

 private:
  std::list<test::ScopedEnv> kept_;
};

TEST_F(JobTest, WithoutALauncherTheProcessIsAlone) {
  EXPECT_EQ(job_from_environment(), Job{});
}

// salloc's shell may be a step of its own, with the allocation's variables.
TEST_F(JobTest, WhatIsStartedByHandInAnAllocationIsAlone) {
  set_slurm();
  set("SLURM_PROCID", "0");
  set("SLURM_STEP_ID", "4294967290");
  EXPECT_EQ(job_from_environment(), Job{});
  set("SLURM_STEP_ID", "");
  EXPECT_EQ(job_from_environment(), Job{});
  set("SLURM_STEP_ID", "0");
  EXPECT_EQ(job_from_environment().world_size, 5) << "a step that srun has made";
}

TEST_F(JobTest, ReadsTorchrunsVariables) {
  set("RANK", "3");
  set("WORLD_SIZE", "4");
  set("LOCAL_RANK", "1");
  set("LOCAL_WORLD_SIZE", "2");
  set("MASTER_ADDR", "node0");
  set("MASTER_PORT", "29501");
  set("TORCHELASTIC_USE_AGENT_STORE", "True");
  set("TORCHELASTIC_RESTART_COUNT", "2");
  const Job job = job_from_environment();
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.world_size, 4);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_world_size, 2);
  EXPECT_EQ(job.master_host, "node0");
  EXPECT_EQ(job.master_port, 29501);
  EXPECT_TRUE(job.agent_store);
  EXPECT_EQ(job.restart_count, 2);
  EXPECT_EQ(to_string(job.launcher), "torchrun");
}

TEST_F(JobTest, RejectsTorchrunsVariablesThatMakeNoSense) {
  set("RANK", "1");
  COHORT_EXPECT_THROW_WITH(job_from_environment(), RendezvousError, "RANK is set but WORLD_SIZE is not");
  set("WORLD_SIZE", "1");
  COHORT_EXPECT_THROW_WITH(job_from_environment(), RendezvousError,
                           "rank is 1, expected 0 to 0 (world size)");
  set("WORLD_SIZE", "two");
  COHORT_EXPECT_THROW_WITH(job_from_environment(), RendezvousError, "WORLD_SIZE");
  set("WORLD_SIZE", "4");
  set("LOCAL_WORLD_SIZE", "1");
  set("LOCAL_RANK", "1");
  COHORT_EXPECT_THROW_WITH(job_from_environment(), RendezvousError, "local rank is 1, expected 0 to 0");
  set("LOCAL_RANK", "0");
  set("MASTER_PORT", "70000");
  COHORT_EXPECT_THROW_WITH(job_from_environment(), RendezvousError, "MASTER_PORT");
}

TEST_F(JobTest, ReadsSlurmsVariables) {
  set_slurm();
  const Job job = job_from_environment();
  EXPECT_EQ(job.launcher, Launcher::kSlurm);
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.world_size, 5);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_world_size, 3);
  EXPECT_EQ(job.master_host, "gpu07");
  EXPECT_GE(job.master_port, 20000);
  EXPECT_LT(job.master_port, 32000);
  set("SLURM_PROCID", "0");
  set("SLURM_LOCALID", "0");
  set("SLURM_NODEID", "0");
  EXPECT_EQ(job_from_environment().master_port, job.master_port)
      << "all ranks of a job must use one port for the rendezvous";
  set("SLURM_JOB_ID", "78");
  EXPECT_NE(job_from_environment().master_port, job.master_port);
  set("MASTER_ADDR", "login");
  set("MASTER_PORT", "1234");
  EXPECT_EQ(job_from_environment().master_host, "login");
  EXPECT_EQ(job_from_environment().master_port, 1234);
}

TEST_F(JobTest, AProgramStartedByHandInAnAllocationIsAlone) {
  set_slurm();
  set("SLURM_STEP_ID", "");
  EXPECT_EQ(job_from_environment(), Job{});
}

TEST_F(JobTest, ReadsOpenMpisVariables) {
  set("OMPI_COMM_WORLD_RANK", "1");
  COHORT_EXPECT_THROW_WITH(job_from_environment(), RendezvousError, "OMPI_COMM_WORLD_SIZE is not");
  set("OMPI_COMM_WORLD_SIZE", "2");
  set("OMPI_COMM_WORLD_LOCAL_RANK", "1");
  set("OMPI_COMM_WORLD_LOCAL_SIZE", "2");
  set("PMIX_NAMESPACE", "12345");
  Job job = job_from_environment();
  EXPECT_EQ(job.launcher, Launcher::kOpenMpi);
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.master_host, "127.0.0.1");
  EXPECT_NE(job.master_port, 0);
  set("OMPI_COMM_WORLD_LOCAL_RANK", "0");
  set("OMPI_COMM_WORLD_LOCAL_SIZE", "1");
  EXPECT_EQ(job_from_environment().master_host, "")
      << "on several hosts the address of the rendezvous must be given";
}

TEST(HostlistTest, ExpandsSlurmsNotation) {
  using Hosts = std::vector<std::string>;
  EXPECT_EQ(expand_hostlist("a"), Hosts{"a"});
  EXPECT_EQ(expand_hostlist("n[01-03,7],gpu1"), (Hosts{"n01", "n02", "n03", "n7", "gpu1"}));
  EXPECT_EQ(expand_hostlist("r[1-2]c[3,4]x"), (Hosts{"r1c3x", "r1c4x", "r2c3x", "r2c4x"}));
  EXPECT_EQ(expand_hostlist("n[098-101]"), (Hosts{"n098", "n099", "n100", "n101"}));
  for (const char* bad : {"", "a,,b", "n[1", "n[]", "n[2-1]", "n[a]", "n[1-]", "n[0-9999999]"}) {
    COHORT_EXPECT_THROW_WITH(expand_hostlist(bad), RendezvousError, "is no list of hosts");
  }
}

TEST(HostlistTest, ExpandsCountsPerNode) {
  EXPECT_EQ(expand_counts("2(x3),1"), (std::vector<int>{2, 2, 2, 1}));
  EXPECT_EQ(expand_counts("4"), std::vector<int>{4});
  for (const char* bad : {"", "x", "2(x", "2(x0)", "2,", "-1", "2(x9999999)"}) {
    COHORT_EXPECT_THROW_WITH(expand_counts(bad), RendezvousError, "is no list of tasks per node");
  }
}

}  // namespace
}  // namespace cohort::comm

// Groups of a program's own under `cohort run --elastic`: real agents, real ranks, one of which dies.
#include <gtest/gtest.h>

#include "tests/cli/job.h"
#include "tests/support/environment.h"
#include "tests/support/messages.h"

namespace cohort::test {
namespace {

TEST(RunElasticGroupsTest, ACallWhoseProcessDiesEndsAndTheStepIsMadeAgain) {
  const TempDir dir;
  const ScopedEnv threads{"OMP_NUM_THREADS", "1"};
  Job job(dir.path(), {"--standalone", "--nproc-per-node=2", "--max-restarts=1", "--elastic",
                       "--bind-to=none", "--", COHORT_GROUP_PROGRAM});
  EXPECT_EQ(job.wait(), 0) << job.err();
  expect_in(job.err(), {"it was killed by signal 9 (Killed)"});
  expect_in(job.out(), {"process 0: 10 steps"});
  expect_in(job.out(), {"process 1: 10 steps"});
}

}  // namespace
}  // namespace cohort::test

// `cohort run --rdzv-backend etcd`: the record of a run is in etcd, and any agent may die.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <string>

#include "cohort/base/error.h"
#include "tests/cli/job.h"
#include "tests/support/environment.h"
#include "tests/support/etcd.h"
#include "tests/support/messages.h"

namespace cohort::test {
namespace {

TEST(RunEtcdTest, TheFirstAgentDiesAndTheRunContinues) {
  const ScopedEnv threads("OMP_NUM_THREADS", "1");
  const TempDir dir;
  const EtcdCluster etcd;
  const auto agent = [&](const std::string& name) {
    return Job(dir.path(), {"--nnodes=1:2", "--rdzv-backend=etcd", "--rdzv-endpoint=" + etcd.endpoint(0),
                            "--rdzv-id=job7", "--bind-to=none", "--", "/bin/sh", "-c",
                            "cd \"$FOLDER\"; touch up_${WORLD_SIZE}_${RANK}_" + name +
                                "; while [ ! -e go ]; do sleep 0.02; done"});
  };
  Job first = agent("a");
  ASSERT_TRUE(comes(dir / "up_1_0_a")) << first.err();
  Job second = agent("b");
  ASSERT_TRUE(comes(dir / "up_2_1_b")) << second.err();
  first.worker().signal(SIGKILL);
  ASSERT_TRUE(comes(dir / "up_1_0_b")) << second.err();
  write_file(dir / "go", "");
  EXPECT_EQ(second.wait(), 0) << second.err();
  EXPECT_EQ(second.err().find("the run ends if"), std::string::npos) << second.err();
}

}  // namespace
}  // namespace cohort::test

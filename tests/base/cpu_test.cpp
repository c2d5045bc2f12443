#include "cohort/base/cpu.h"

#include <gtest/gtest.h>

#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/internal/cgroup.h"
#include "tests/support/environment.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

using test::ScopedEnv;
using test::TempDir;
using test::write_file;

constexpr const char* kV2Mount =
    "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr const char* kV1Mount =
    "33 32 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "34 32 0:29 / /sys/fs/cgroup/cpuset rw shared:9 - cgroup cgroup rw,cpuset\n";

TEST(CpuSetTest, ReadsAndWritesTheSystemsNotation) {
  const CpuSet cpus = CpuSet::parse("2-3,5,3");
  EXPECT_EQ(cpus.ids(), (std::vector<int>{2, 3, 5}));
  EXPECT_EQ(cpus.to_string(), "2-3,5");
  EXPECT_TRUE(cpus.contains(5));
  EXPECT_FALSE(cpus.contains(4));
  EXPECT_EQ(CpuSet::parse("0").ids(), std::vector<int>{0});
  EXPECT_EQ(CpuSet::parse("0,2,4-6").to_string(), "0,2,4-6");
}

TEST(CpuSetTest, RejectsOtherTextShowingThePart) {
  COHORT_EXPECT_THROW_WITH(CpuSet::parse("0,x"), ConfigError,
                           "cores \"0,x\": got \"x\", expected a core number");
  COHORT_EXPECT_THROW_WITH(CpuSet::parse(""), ConfigError, "got \"\", expected a core number");
  COHORT_EXPECT_THROW_WITH(CpuSet::parse("1-"), ConfigError, "got \"\"");
  COHORT_EXPECT_THROW_WITH(CpuSet::parse("-1"), ConfigError, "got \"\"");
  COHORT_EXPECT_THROW_WITH(CpuSet::parse("0,"), ConfigError, "got \"\"");
  COHORT_EXPECT_THROW_WITH(CpuSet::parse("0-99999999"), ConfigError, "got \"99999999\"");
  COHORT_EXPECT_THROW_WITH(CpuSet::parse("3-1"), ConfigError, "range 3-1 runs backwards. Try: 1-3");
}

TEST(CpuSetTest, PinsAThreadAndRestoresWhatWas) {
  const CpuSet before = CpuSet::of_current_thread();
  const CpuSet last({before.ids().back()});
  {
    const ScopedPin pin(last);
    EXPECT_EQ(CpuSet::of_current_thread(), last);
    CpuSet inherited;
    std::thread([&]() { inherited = CpuSet::of_current_thread(); }).join();
    EXPECT_EQ(inherited, last);
    EXPECT_EQ(CpuSet::of_process(), before)
        << "what the process may use does not shrink when a thread is pinned";
  }
  EXPECT_EQ(CpuSet::of_current_thread(), before);
}

TEST(CpuSetTest, RejectsToPinToNoCoreOrToOnesThatAreNotThere) {
  COHORT_EXPECT_THROW_WITH(CpuSet().pin_current_thread(), UsageError, "the set of cores is empty");
  COHORT_EXPECT_THROW_WITH(CpuSet({100000}).pin_current_thread(), SystemError,
                           "cannot pin a thread to cores 100000");
  COHORT_EXPECT_THROW_WITH(CpuSet({100000}).pin_current_thread(), SystemError,
                           "cores out of " + CpuSet::of_process().to_string());
}

TEST(CgroupTest, ReadsTheQuotaOfVersion2) {
  const TempDir root;
  write_file(root / "proc/self/mountinfo", kV2Mount);
  write_file(root / "proc/self/cgroup", "0::/user.slice/job.scope\n");
  write_file(root / "sys/fs/cgroup/user.slice/job.scope/cpu.max", "150000 100000\n");
  const auto quota = cgroup_cpu_quota(root.path());
  ASSERT_TRUE(quota.has_value());
  EXPECT_DOUBLE_EQ(quota->cores, 1.5);
  EXPECT_NE(quota->source.find("job.scope/cpu.max"), std::string::npos);
}

TEST(CgroupTest, TakesTheTightestQuotaOfAllGroupsAbove) {
  const TempDir root;
  write_file(root / "proc/self/mountinfo", kV2Mount);
  write_file(root / "proc/self/cgroup", "0::/a/b/c\n");
  write_file(root / "sys/fs/cgroup/a/b/c/cpu.max", "max 100000\n");
  write_file(root / "sys/fs/cgroup/a/b/cpu.max", "400000 100000\n");
  write_file(root / "sys/fs/cgroup/a/cpu.max", "300000 100000\n");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(root.path())->cores, 3);
}

TEST(CgroupTest, ReadsTheQuotaOfVersion1) {
  const TempDir root;
  write_file(root / "proc/self/mountinfo", kV1Mount);
  write_file(root / "proc/self/cgroup",
             "5:cpuset:/elsewhere\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n");
  write_file(root / "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "250000\n");
  write_file(root / "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000\n");
  write_file(root / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  write_file(root / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(root.path())->cores, 2.5);
}

TEST(CgroupTest, FindsTheContainersGroupWhenThePathIsTheHosts) {
  const TempDir root;
  // The container sees only its own part of the tree, mounted at the top, but /proc names it as the host
  // does.
  write_file(root / "proc/self/mountinfo",
             "33 32 0:28 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n");
  write_file(root / "proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n");
  write_file(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n");
  write_file(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(root.path())->cores, 2);
}

TEST(CgroupTest, NoQuotaAndUnreadableFilesAreNoLimit) {
  const TempDir root;
  EXPECT_FALSE(cgroup_cpu_quota(root.path()).has_value());
  write_file(root / "proc/self/mountinfo", kV2Mount);
  EXPECT_FALSE(cgroup_cpu_quota(root.path()).has_value());
  write_file(root / "proc/self/cgroup", "0::/\n");
  for (const char* text : {"max 100000\n", "", "garbage", "-5 100000\n", "100000 0\n", "max\n"}) {
    write_file(root / "sys/fs/cgroup/cpu.max", text);
    EXPECT_FALSE(cgroup_cpu_quota(root.path()).has_value()) << text;
  }
}

TEST(CoreLimitsTest, UsableIsTheLeastOfAllBoundsRoundedUpAndAtLeastOne) {
  CoreLimits limits;
  limits.online = 64;
  limits.affinity = 8;
  EXPECT_EQ(limits.usable(), 8);
  limits.quota = 1.5;
  EXPECT_EQ(limits.usable(), 2);
  limits.quota = 0.1;
  EXPECT_EQ(limits.usable(), 1);
  limits.quota = 1e12;
  EXPECT_EQ(limits.usable(), 8);
}

TEST(CoreLimitsTest, QuotaOfAContainerBoundsTheUsableCores) {
  const TempDir root;
  write_file(root / "proc/self/mountinfo", kV2Mount);
  write_file(root / "proc/self/cgroup", "0::/\n");
  write_file(root / "sys/fs/cgroup/cpu.max", "50000 100000\n");
  const CoreLimits limits = core_limits(root.path());
  EXPECT_EQ(limits.usable(), 1);
  EXPECT_EQ(limits.affinity, CpuSet::of_process().size());
  EXPECT_GE(limits.online, limits.affinity);
  EXPECT_EQ(limits.quota_source, (root / "sys/fs/cgroup/cpu.max").string());
}

TEST(CoreLimitsTest, VariableOverrulesTheCount) {
  {
    const ScopedEnv env("COHORT_CORES", std::nullopt);
    EXPECT_EQ(usable_cores(), core_limits().usable());
  }
  {
    const ScopedEnv env("COHORT_CORES", "37");
    EXPECT_EQ(usable_cores(), 37);
  }
  const ScopedEnv env("COHORT_CORES", "0");
  COHORT_EXPECT_THROW_WITH(usable_cores(), ConfigError,
                           "COHORT_CORES: got \"0\", expected a whole number from 1");
}

}  // namespace
}  // namespace cohort::base

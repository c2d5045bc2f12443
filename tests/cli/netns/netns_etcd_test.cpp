// A run whose record is in etcd, on hosts of its own: any of them may be cut off or fail, also the first.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>

#include "tests/cli/netns/netns.h"
#include "tests/cli/netns/virtual_run.h"
#include "tests/support/net/etcd.h"

namespace cohort::test {
namespace {

using NetnsEtcdTest = NetnsTest;

// Each host has a member of etcd, an agent and a rank.
TEST_F(NetnsEtcdTest, AnyHostMayBeCutOffOrFail) {
  std::vector<std::string> addresses;
  for (int host = 0; host < 3; ++host) addresses.push_back(VirtualHosts::address(host));
  VirtualRun run({.endpoint = addresses[0] + "," + addresses[1] + "," + addresses[2],
                  .flags = {"--rdzv-backend=etcd", "--rdzv-id=job7"}});
  EtcdCluster etcd({addresses, [&](int host, const auto& start) { run.hosts().enter(host, start); }});
  for (int host = 0; host < 3; ++host) run.start(host);
  ASSERT_TRUE(run.come_to_train({0, 1, 2})) << run.story();
  run.hosts().isolate(1);
  const std::uint64_t begun = run.step_begun_by(1);
  ASSERT_TRUE(run.come_to_train({0, 2})) << run.story();
  ASSERT_TRUE(run.make_steps(3)) << run.story();
  EXPECT_LE(run.step_begun_by(1), begun + 1) << "a minority commits no more than what was under way";
  run.hosts().heal();
  ASSERT_TRUE(run.come_to_train({0, 1, 2})) << run.story();
  run.fail_host(0);
  etcd.kill(0);
  ASSERT_TRUE(run.come_to_train({1, 2})) << run.story();
  EXPECT_EQ(run.finish({1, 2}), "") << run.story();
}

// Its answers come 300 ms late, and a connection takes as long. Changes of the run take longer then.
TEST_F(NetnsEtcdTest, ASlowEtcdCostsTimeAlone) {
  VirtualRun run({.endpoint = VirtualHosts::address(2), .flags = {"--rdzv-backend=etcd", "--rdzv-id=job7"}});
  EtcdCluster etcd(
      {{VirtualHosts::address(2)}, [&](int, const auto& start) { run.hosts().enter(2, start); }});
  for (int host = 0; host < 2; ++host) run.start(host);
  ASSERT_TRUE(run.come_to_train({0, 1})) << run.story();
  run.hosts().set_links_of(2, {.delay = std::chrono::milliseconds(150)});
  ::kill(run.newest().ranks.at(1), SIGKILL);
  ASSERT_TRUE(run.come_to_train({0, 1})) << run.story();
  run.agent(1).worker().kill();
  ASSERT_TRUE(run.come_to_train({0})) << run.story();
  run.start(1);
  ASSERT_TRUE(run.come_to_train({0, 1})) << run.story();
  EXPECT_GT(run.hosts().counts().delayed, 0U);
  EXPECT_EQ(run.finish({0, 1}), "") << run.story();
}

}  // namespace
}  // namespace cohort::test

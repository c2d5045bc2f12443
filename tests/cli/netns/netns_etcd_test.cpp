// A run whose record is in etcd, on hosts of its own: any of them may be cut off or fail, also the first.
#include <gtest/gtest.h>

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
  ASSERT_TRUE(run.come_to_train({0, 2})) << run.story();
  run.hosts().heal();
  ASSERT_TRUE(run.come_to_train({0, 1, 2})) << run.story();
  run.fail_host(0);
  etcd.kill(0);
  ASSERT_TRUE(run.come_to_train({1, 2})) << run.story();
  EXPECT_EQ(run.finish({1, 2}), "") << run.story();
}

}  // namespace
}  // namespace cohort::test

// Processes that join a running job by init_rpc(), over a store of c10d's. One is killed, and another one
// takes its name.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/key_value_store.h"
#include "cohort/base/threads/wait_for_listener.h"
#include "cohort/comm/group.h"
#include "cohort/comm/store_adapter.h"
#include "cohort/rpc/init.h"
#include "tests/rpc/faults.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"
#include "tests/support/processes.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

int rank_of_member() {
  return std::atoi(std::getenv("RANK"));
}
int rank_through_member(const std::string& worker) {
  return rpc_sync<rank_of_member>(worker);
}
COHORT_REMOTE(rank_of_member);
COHORT_REMOTE(rank_through_member);

constexpr std::chrono::seconds kShutdownTime(20);

TEST(AgentMembersChild, DISABLED_Process) {
  const int rank = rank_of_member();
  const std::string folder = std::getenv("TEST_FOLDER");
  const RpcOptions options{.store = std::make_shared<comm::StoreAdapter>(
                               c10::make_intrusive<c10d::FileStore>(folder + "/store", 4))};
  test::FolderStore steps(folder);
  const auto wait_for = [&](const std::string& step) { test::wait_until([&] { return steps.has(step); }); };
  if (rank == 0) {
    init_rpc("ps/0", options);
    COHORT_EXPECT_THROW_WITH(init_rpc("ps/1", options), UsageError, "this process has an agent");
    steps.set("joined/0", "");
    wait_for("joined/3");
    EXPECT_EQ(rpc_sync<rank_of_member>("trainer/2"), 3);
    steps.set("called/0", "");
  } else if (rank == 1) {
    wait_for("joined/0");
    init_rpc("trainer/1", options);
    EXPECT_EQ(rpc_sync<rank_of_member>("ps/0"), 0);
    EXPECT_EQ(rpc_sync<rank_through_member>("ps/0", "trainer/1"), 1);
    steps.set("joined/1", "");
    wait_for("joined/3");
    EXPECT_EQ(rpc_sync<rank_of_member>("trainer/2"), 3);
    EXPECT_EQ(workers("trainer/*").size(), 2U);
    steps.set("called/1", "");
  } else if (rank == 2) {
    wait_for("joined/1");
    init_rpc("trainer/2", options);
    EXPECT_EQ(rpc_sync<rank_through_member>("trainer/1", "trainer/2"), 2);
    steps.set("joined/2", "");
    ::kill(::getpid(), SIGKILL);
  } else {
    wait_for("joined/2");
    init_rpc("trainer/2", options);  // at once: the others may not know of the death yet
    EXPECT_EQ(rpc_sync<rank_through_member>("ps/0", "trainer/2"), 3);
    EXPECT_EQ(workers().size(), 3U);
    steps.set("joined/3", "");
    wait_for("called/0");  // shutdown() does not wait for others
    wait_for("called/1");
  }
  shutdown(kShutdownTime);
}

TEST(AgentMembersProcessesTest, ProcessesJoinARunningJobAndTakeTheNamesOfTheDead) {
  test::RankProcesses processes("AgentMembersChild", 4);
  const std::vector<int> statuses = processes.wait(std::chrono::seconds(60));
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(statuses.at(static_cast<std::size_t>(rank)), 0) << processes.output(rank);
  }
  EXPECT_EQ(statuses.at(2), -1) << "it was killed";
}

TEST(AgentMembersProcessesTest, AStoreAndAGroupAreNotTakenTogether) {
  comm::Group group =
      comm::make_group(c10::make_intrusive<c10d::HashStore>(), 0, 1, "fake", std::chrono::seconds(20));
  RpcOptions options;
  options.group = group;
  options.store = std::make_shared<comm::StoreAdapter>(group.store());
  COHORT_EXPECT_THROW_WITH(init_rpc("w0", options), UsageError, "got a store and a group");
}

// The address that a worker leaves for other hosts, of which one says that it is rank 0's and is reached at
// `rank_0`.
std::string address_for_others(const std::string& rank_0) {
  const comm::Group group = comm::make_group(c10::make_intrusive<c10d::HashStore>(), 1, 2, "fake",
                                             std::chrono::seconds(20), rank_0);
  std::string word;
  std::thread other([&] {
    comm::StoreAdapter store(group.store());
    const base::Deadline deadline(std::chrono::seconds(20));
    base::all_gather_words(store, "rpc/1/host", 0, 2, "another host", deadline);
    if (store.wait({"rpc/1/join/1"}, deadline)) word = store.get("rpc/1/join/1");
    store.set("rpc/1/join/all", "-0");
  });
  RpcOptions options;
  options.group = group;
  options.agent.secret = base::Secret::make();
  COHORT_EXPECT_THROW_WITH(init_rpc("w1", options), RendezvousError, "these did not come");
  other.join();
  constexpr std::string_view kBegin = "\"address\":\"";
  const std::size_t begin = word.find(kBegin) + kBegin.size();
  return word.substr(begin, word.find_last_of(':', word.find('"', begin)) - begin);
}

// The address is of those that RFC 5737 keeps for documents.
TEST(AgentMembersProcessesTest, AWorkerTellsOtherHostsTheAddressTowardsTheirs) {
  std::string own = base::address_towards("192.0.2.250");
  if (!base::is_far_address(own)) own = base::host_name();  // this host has no way to others
  EXPECT_EQ(address_for_others("192.0.2.250"), own);
}

// Debian has a host's own name at 127.0.1.1. The system takes this number for a name of 127.0.0.1.
TEST(AgentMembersProcessesTest, WhereRank0sNameIsTheLoopbackInterfacesOthersAreToldTheName) {
  EXPECT_EQ(address_for_others("0x7f.1"), "0x7f.1");
  EXPECT_EQ(address_for_others("127.0.0.1"), base::host_name()) << "which is another host to others";
}

}  // namespace
}  // namespace cohort::rpc

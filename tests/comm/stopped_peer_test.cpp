// A process that stands still (SIGSTOP) at each kind of call: the others' errors come in time and name it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <stdexcept>

#include "cohort/base/error.h"
#include "cohort/comm/desync.h"
#include "cohort/comm/group.h"
#include "cohort/comm/init.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/messages.h"
#include "tests/support/processes.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kCallTime(600);

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Each call in a group of its own, since a group is broken after the first error.
TEST(StoppedPeerChild, DISABLED_Rank) {
  const int stopped = std::atoi(variable("TEST_STOPPED").c_str());
  const ConsistencyCheck check_consistency =
      variable("TEST_CHECK") == "on" ? ConsistencyCheck::kAlways : ConsistencyCheck::kOff;
  Group world = init_process_group(
      {.backend = variable("TEST_BACKEND"), .timeout = seconds(40), .check_consistency = check_consistency});
  std::optional<DesyncWatch> watch;
  if (variable("TEST_WATCH") == "on") watch = watch_for_desync(world);
  std::vector<Group> groups;
  for (int i = 0; i < 5; ++i)
    groups.push_back(
        world.subgroup({0, 1}, {.timeout = seconds(40), .check_consistency = check_consistency}));
  world.barrier();
  if (world.rank() == stopped) ::raise(SIGSTOP);
  std::this_thread::sleep_for(milliseconds(100));
  const auto expect_late = [&](const char* what, const std::function<void()>& call) {
    const base::Deadline waited(seconds(60));
    try {
      call();
      ADD_FAILURE() << what << " came to an end";
    } catch (const Error& error) {
      EXPECT_LT(waited.elapsed(), kCallTime + test::deadline_slack()) << what << ": " << error.what();
      // The store goes silent with rank 0, which keeps it.
      const std::string name = base::concat("rank ", stopped);
      const std::string text = error.what();
      const bool is_store = stopped == 0 && text.find("store") != std::string::npos;
      EXPECT_TRUE(is_store || text.find(name) != std::string::npos) << what << ": " << text;
    }
  };
  at::Tensor t = at::ones({1000});
  const CallOptions late{kCallTime};
  expect_late("all_reduce", [&] { groups[0].all_reduce(t, ReduceOp::SUM, late).wait(); });
  expect_late("recv", [&] { groups[1].recv(t, stopped, 0, late).wait(); });
  expect_late("barrier", [&] { groups[2].barrier(late); });
  expect_late("broadcast", [&] { groups[3].broadcast(t, stopped, late).wait(); });
  // Calls that nobody waits for any more, since an error takes the caller away, end together.
  const CallOptions soon{milliseconds(300)};
  const base::Deadline waited(soon.timeout);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 6; ++i) tensors.push_back(at::ones({1000}));
  try {
    std::vector<Pending> pending;
    for (at::Tensor& each : tensors) pending.push_back(groups[4].all_reduce(each, ReduceOp::SUM, soon));
    throw std::runtime_error("of the caller");
  } catch (const std::runtime_error&) {
    EXPECT_LT(waited.elapsed(), soon.timeout + test::deadline_slack()) << "six calls in flight";
  }
  std::fprintf(stderr, "has seen all\n");
}

struct Case {
  const char* backend;
  int stopped;
  const char* watch;
  const char* check;
};

class StoppedPeerTest : public testing::TestWithParam<Case> {};

TEST_P(StoppedPeerTest, EveryCallEndsAtItsDeadlineAndNamesIt) {
  const auto [backend, stopped, watch, check] = GetParam();
  test::RankProcesses ranks("StoppedPeerChild", 2,
                            {{"TEST_BACKEND", backend},
                             {"TEST_STOPPED", std::to_string(stopped)},
                             {"TEST_WATCH", watch},
                             {"TEST_CHECK", check}});
  const int other = 1 - stopped;
  ranks.wait_for(other, "has seen all");
  EXPECT_EQ(ranks.output(other).find("Failure"), std::string::npos) << ranks.output(other);
}

// Rank 2 does not come, and programs end with their error: rank 0's first, and the store with it.
TEST(BlameChild, DISABLED_Rank) {
  Group group = init_process_group(
      {.backend = "gloo", .timeout = seconds(40), .check_consistency = ConsistencyCheck::kOff});
  group.barrier();
  if (group.rank() == 2) std::this_thread::sleep_for(seconds(8));
  if (group.rank() == 1) std::this_thread::sleep_for(milliseconds(100));
  at::Tensor tensor = at::ones({1000});
  try {
    group.all_reduce(tensor, ReduceOp::SUM, {seconds(1)}).wait();
  } catch (const Error& error) {
    std::fprintf(stderr, "says: %s\n", error.what());
    std::exit(1);
  }
}

TEST(StuckPeerTest, IsNamedAlsoAfterTheRankThatKeepsTheStoreHasEnded) {
  test::RankProcesses ranks("BlameChild", 3);
  for (const int rank : {0, 1}) {
    ranks.wait_for(rank, "says:");
    // Rank 0 names rank 1 too where that is late to notice.
    const char* const name = rank == 0 ? "2 of 3" : "rank 2 of 3";
    EXPECT_NE(ranks.output(rank).find(name), std::string::npos) << ranks.output(rank);
  }
}

// A peer dies while six calls are in flight, and the watch asks all for their table.
TEST(DeathChild, DISABLED_Rank) {
  Group group = init_process_group(
      {.backend = "gloo", .timeout = seconds(40), .check_consistency = ConsistencyCheck::kOff});
  const DesyncWatch watch = watch_for_desync(group);
  group.barrier();
  if (group.rank() == 1) {
    std::this_thread::sleep_for(milliseconds(300));
    ::raise(SIGKILL);
  }
  std::vector<at::Tensor> tensors;
  std::vector<Pending> pending;
  for (int i = 0; i < 6; ++i) tensors.push_back(at::ones({1000}));
  for (at::Tensor& tensor : tensors) pending.push_back(group.all_reduce(tensor));
  EXPECT_THROW(pending[0].wait(), Error);
  const base::Deadline waited(seconds(60));
  for (Pending& each : pending) {
    try {
      each.wait();
    } catch (const Error&) {
    }
  }
  EXPECT_LT(waited.elapsed(), milliseconds(1500)) << "five more calls";
  std::fprintf(stderr, "has seen all\n");
}

TEST(DeadPeerTest, CallsInFlightEndTogetherAfterADeath) {
  test::RankProcesses ranks("DeathChild", 2);
  ranks.wait_for(0, "has seen all");
  EXPECT_EQ(ranks.output(0).find("Failure"), std::string::npos) << ranks.output(0);
}

INSTANTIATE_TEST_SUITE_P(All, StoppedPeerTest,
                         testing::Values(Case{"gloo", 1, "off", "off"}, Case{"gloo", 1, "on", "on"},
                                         Case{"gloo", 0, "off", "off"}, Case{"shm", 1, "off", "off"},
                                         Case{"shm", 1, "on", "on"}, Case{"shm", 0, "on", "off"}),
                         [](const auto& info) {
                           const Case& test_case = info.param;
                           return base::concat(test_case.backend, "_rank", test_case.stopped, "_watch_",
                                               test_case.watch, "_compared_", test_case.check);
                         });

}  // namespace
}  // namespace cohort::comm

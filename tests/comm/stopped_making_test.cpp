// A rank that stands still at each step of making a group: the other's error comes in time and names it.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/comm/group.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/comm/internal/tcp_store.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/gate.h"
#include "tests/support/stores/hooked_store.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kMakingTime(1500);
constexpr int kMaxRequests = 24;  // of a rank that makes a group

// What the other one says of making a group with `stopped`, which stops before its request number `at`;
// nothing where the group is made all the same.
std::string error_beside(const std::string& backend, int stopped, int at) {
  const auto hash = c10::make_intrusive<c10d::HashStore>();
  test::Gate gate;
  std::atomic<int> requests{0};
  std::thread rank([&] {
    const auto store = c10::make_intrusive<test::HookedStore>(hash, [&] {
      if (requests++ == at) gate.wait();
    });
    try {
      make_group(store, stopped, 2, backend, 4 * kMakingTime, "127.0.0.1");
    } catch (const std::exception&) {  // of what came of the other one
    }
  });
  std::string text;
  const base::Deadline waited(kMakingTime);
  try {
    make_group(hash, 1 - stopped, 2, backend, kMakingTime, "127.0.0.1");
  } catch (const Error& error) {
    text = error.what();
    EXPECT_LT(waited.elapsed(), kMakingTime + test::deadline_slack()) << "request " << at << ": " << text;
  }
  gate.open();
  rank.join();
  return text;
}

class StoppedMakingTest : public testing::TestWithParam<std::tuple<std::string, int>> {};

// Side by side, since each takes the whole time.
TEST_P(StoppedMakingTest, AtEachRequestToTheStore) {
  const auto& [backend, stopped] = GetParam();
  std::atomic<int> num_errors{0};
  std::vector<std::thread> threads;
  for (int at = 0; at < kMaxRequests; ++at) {
    threads.emplace_back([&, backend = backend, stopped = stopped, at] {
      const std::string text = error_beside(backend, stopped, at);
      if (text.empty()) return;
      ++num_errors;
      EXPECT_NE(text.find(base::concat("rank ", stopped, " ")), std::string::npos)
          << "request " << at << ": " << text;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(num_errors.load(), 4);
  EXPECT_LT(num_errors.load(), kMaxRequests) << "there may be more requests";
}

// As init_process_group() has it: each rank its one connection, and rank 0 the store itself where no agent
// keeps it. Rank 2 never comes, and the deadlines of the other two are 0.7 s apart.
void make_without_rank_2(const std::string& backend, bool is_kept_by_agent) {
  const std::string name =
      base::concat(backend, is_kept_by_agent ? ", an agent's store" : ", rank 0's store");
  const auto kept = open_tcp_store({.host = "127.0.0.1", .port = 0, .serves = true, .is_local = true});
  const auto make = [&](int rank) {
    c10::intrusive_ptr<c10d::Store> store = kept;
    if (rank > 0 || is_kept_by_agent) {
      const auto port = static_cast<std::uint16_t>(kept->getPort());
      store = c10::make_intrusive<DeadlineStore>(open_tcp_store({.host = "127.0.0.1", .port = port}),
                                                 "the store");
    }
    if (rank > 0) std::this_thread::sleep_for(milliseconds(700));
    const milliseconds timeout(3000);
    const base::Deadline waited(timeout);
    try {
      make_group(store, rank, 3, backend, timeout);
      ADD_FAILURE() << name << ": a group was made";
    } catch (const Error& error) {
      const std::string text = base::concat(name, ", rank ", rank, ": ", error.what());
      EXPECT_LT(waited.elapsed(), timeout + test::deadline_slack()) << text;
      EXPECT_NE(text.find("rank 2 "), std::string::npos) << text;
      EXPECT_EQ(text.find("cannot be reached"), std::string::npos) << text;
    }
  };
  std::thread other(make, 1);
  make(0);
  other.join();
}

TEST(MakingOverTcpTest, LateRanksOverTcpAreNoMissingOnes) {
  std::vector<std::thread> threads;
  for (const char* backend : {"gloo", "shm"}) {
    for (const bool is_kept_by_agent : {false, true}) {
      threads.emplace_back(make_without_rank_2, backend, is_kept_by_agent);
    }
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(All, StoppedMakingTest,
                         testing::Combine(testing::Values("gloo", "shm"), testing::Values(0, 1)),
                         [](const auto& info) {
                           return base::concat(std::get<0>(info.param), "_rank", std::get<1>(info.param));
                         });

}  // namespace
}  // namespace cohort::comm

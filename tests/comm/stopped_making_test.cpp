// A rank that stands still at each step of making a group: the other's error comes in time and names it.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "cohort/comm/group.h"
#include "cohort/core/deadline.h"
#include "cohort/core/error.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/gate.h"
#include "tests/support/hooked_store.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTime(500);
constexpr int kMostRequests = 24;  // of a rank that makes a group

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
      make_group(store, stopped, 2, backend, 4 * kTime, "127.0.0.1");
    } catch (const std::exception&) {  // of what came of the other one
    }
  });
  std::string text;
  const core::Deadline waited(kTime);
  try {
    make_group(hash, 1 - stopped, 2, backend, kTime, "127.0.0.1");
  } catch (const Error& error) {
    text = error.what();
    EXPECT_LT(waited.elapsed(), kTime + test::deadline_slack()) << "request " << at << ": " << text;
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
  for (int at = 0; at < kMostRequests; ++at) {
    threads.emplace_back([&, backend = backend, stopped = stopped, at] {
      const std::string text = error_beside(backend, stopped, at);
      if (text.empty()) return;
      ++num_errors;
      EXPECT_NE(text.find(core::concat("rank ", stopped, " ")), std::string::npos)
          << "request " << at << ": " << text;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(num_errors.load(), 4);
  EXPECT_LT(num_errors.load(), kMostRequests) << "there may be more requests";
}

INSTANTIATE_TEST_SUITE_P(All, StoppedMakingTest,
                         testing::Combine(testing::Values("gloo", "shm"), testing::Values(0, 1)),
                         [](const auto& info) {
                           return core::concat(std::get<0>(info.param), "_rank", std::get<1>(info.param));
                         });

}  // namespace
}  // namespace cohort::comm

// Many workers of one host, each a process: they connect all to all, call each other, and leave. The time
// counts from when the last has loaded LibTorch. COHORT_RPC_WORKERS: how many.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/agent.h"
#include "tests/rpc/faults.h"
#include "tests/support/patience.h"
#include "tests/support/processes.h"

namespace cohort::rpc {
namespace {

#ifdef COHORT_IS_SANITIZED
constexpr double kMaxJobSeconds = 100;
#else
constexpr double kMaxJobSeconds = 10;
#endif
constexpr std::int64_t kMaxMegabytes = 64;  // that a worker takes on top of LibTorch

std::int64_t pair_of_workers(std::int64_t caller, std::int64_t callee) {
  return caller * 1'000 + callee;
}
COHORT_REMOTE(pair_of_workers);

// On the clock that all processes of a host share.
std::string seconds_by_clock() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::to_string(std::chrono::duration<double>(now).count());
}

// What this process has written, and what it shares with others of it.
std::int64_t megabytes_in_use() {
  std::ifstream status("/proc/self/status");
  std::int64_t kilobytes = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:") || line.starts_with("RssShmem:")) {
      kilobytes += std::stoll(line.substr(line.find(':') + 1));
    }
  }
  return kilobytes / 1'024;
}

// A few that every process has, and four for each other worker: its socket, its process, and two while they
// connect.
void limit_descriptors_to(int num_workers) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, static_cast<rlim_t>(32 + 4 * num_workers));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST(AgentManyWorkersChild, DISABLED_Worker) {
  const int id = std::atoi(std::getenv("RANK")), num_workers = std::atoi(std::getenv("WORLD_SIZE"));
  test::FolderStore store(std::getenv("TEST_FOLDER"));
  store.set(base::concat("loaded/", id), seconds_by_clock());
  limit_descriptors_to(num_workers);
  const std::int64_t before = megabytes_in_use();
  AgentOptions options;
  options.num_threads = 1;
  options.join_timeout = std::chrono::seconds(200);  // for the last to load LibTorch
  options.silence = std::chrono::seconds(20);        // of one that gets no core
  std::optional<Agent> agent(std::in_place, base::concat("w", id), id, num_workers, store, options);
  std::vector<Future<std::int64_t>> answers;
  for (int callee = 0; callee < num_workers; ++callee) {
    answers.push_back(agent->rpc_async<pair_of_workers>(callee, id, callee));
  }
  for (int callee = 0; callee < num_workers; ++callee) {
    EXPECT_EQ(answers[static_cast<std::size_t>(callee)].get(), id * 1'000 + callee);
  }
#ifndef COHORT_IS_SANITIZED
  EXPECT_LT(megabytes_in_use() - before, kMaxMegabytes);
#endif
  agent->shutdown(test::patience());
  agent.reset();
  std::printf("%ld MB on top of LibTorch\n", static_cast<long>(megabytes_in_use() - before));
  store.set(base::concat("ended/", id), seconds_by_clock());
}

TEST(AgentManyWorkersTest, ConnectAllToAllCallEachOtherAndLeaveWithinTenSeconds) {
  const char* const text = std::getenv("COHORT_RPC_WORKERS");
  const int num_workers = text == nullptr ? 12 : std::atoi(text);
  test::RankProcesses workers("AgentManyWorkersChild", num_workers);
  const std::vector<int> statuses = workers.wait(std::chrono::seconds(240));
  for (int id = 0; id < num_workers; ++id) {
    ASSERT_EQ(statuses.at(static_cast<std::size_t>(id)), 0) << "w" << id << ":\n" << workers.output(id);
  }
  test::FolderStore store(workers.folder());
  double loaded = 0, ended = 0;
  for (int id = 0; id < num_workers; ++id) {
    loaded = std::max(loaded, std::stod(store.get(base::concat("loaded/", id))));
    ended = std::max(ended, std::stod(store.get(base::concat("ended/", id))));
  }
  std::printf("%d workers: %.2f s from the last that has loaded LibTorch to the end\n", num_workers,
              ended - loaded);
  EXPECT_LT(ended - loaded, kMaxJobSeconds);
}

}  // namespace
}  // namespace cohort::rpc

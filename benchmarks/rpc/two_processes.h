#pragma once

#include <c10/util/intrusive_ptr.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "cohort/comm/store_adapter.h"
#include "cohort/memory/allocator.h"
#include "cohort/rpc/agent.h"

namespace bench_rpc {

using Store = c10::intrusive_ptr<c10d::Store>;

/// Runs body(rank, store) in two processes, and returns what rank 0's returned. This process has no threads
/// yet.
inline double in_two_processes(const std::function<double(int, const Store&)>& body) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("rpc_benchmark_" + std::to_string(getpid()));
  std::filesystem::remove(path);
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("no pipe can be had");
  for (int rank = 0; rank < 2; ++rank) {
    if (fork() != 0) continue;
    try {
      const double time = body(rank, c10::make_intrusive<c10d::FileStore>(path.string(), 2));
      if (rank == 0 && write(ends[1], &time, sizeof time) != sizeof time) _exit(1);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      _exit(1);
    }
    _exit(0);
  }
  close(ends[1]);
  double time = 0;
  const bool is_there = read(ends[0], &time, sizeof time) == sizeof time;
  close(ends[0]);
  while (wait(nullptr) > 0) {
  }
  std::filesystem::remove(path);
  if (!is_there) throw std::runtime_error("a process failed");
  return time;
}

/// One of two agents, w0 and w1: returns what `measure` of w0's returns, and 0 for w1.
inline double run_agent(int rank, const Store& store, const cohort::rpc::AgentOptions& options,
                        const std::function<double(cohort::rpc::Agent&)>& measure) {
  cohort::comm::StoreAdapter adapter(store);
  cohort::rpc::Agent agent("w" + std::to_string(rank), rank, 2, adapter, options);
  const double figure = rank == 0 ? measure(agent) : 0;
  agent.shutdown(cohort::base::Deadline(std::chrono::minutes(5)));
  return figure;
}

/// The main function of a program with the arguments [ROUNDS [PART OF A NAME]]: calls compare(workload,
/// rounds) for each of make_workloads() whose name has the part.
template <typename MakeWorkloads, typename Compare>
int run_workloads(int count, char** arguments, const MakeWorkloads& make_workloads, const Compare& compare) {
  try {
    cohort::memory::tune_allocator();
    const std::string part = count > 2 ? arguments[2] : "";
    for (const auto& workload : make_workloads()) {
      if (std::string_view(workload.name).find(part) == std::string_view::npos) continue;
      compare(workload, count > 1 ? std::atoi(arguments[1]) : 5);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace bench_rpc

#pragma once

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/comm/group.h"
#include "cohort/comm/internal/tcp_store.h"
#include "cohort/comm/job.h"
#include "tests/support/slowdown.h"

namespace cohort::test {

/// Whether the ranks of a backend are processes: mpirun starts this program `size` times, and each runs the
/// same tests.
inline bool ranks_are_processes(const std::string& backend) {
  return backend == "mpi";
}

/// Runs body(group) where this process is one of `size` ranks that mpirun has started.
inline void run_as_rank(int size, const std::string& backend, const std::function<void(comm::Group&)>& body,
                        std::chrono::milliseconds timeout, comm::ConsistencyCheck check_consistency) {
  static const comm::Job job = comm::job_from_environment();
  if (job.world_size != size || job.launcher != comm::Launcher::kOpenMpi) {
    throw std::runtime_error(base::concat("this needs mpirun with ", size, " ranks, got ", job.world_size,
                                          " from ", comm::to_string(job.launcher)));
  }
  static const auto store = comm::open_tcp_store(
      {.host = job.master_host, .port = job.master_port, .serves = job.rank == 0, .timeout = timeout});
  static int run = 0;
  const auto own = c10::make_intrusive<c10d::PrefixStore>(base::concat("run ", run++), store);
  comm::Group group = comm::make_group(own, job.rank, size, backend, timeout, "127.0.0.1", check_consistency);
  body(group);
}

/// Runs body(group) on `size` threads, each a rank of one group, and returns when all have ended. What rank
/// 0, or the lowest rank that failed, threw is thrown on. Where the ranks are processes this one runs one of
/// them, and throws what that threw.
inline void run_ranks(int size, const std::string& backend, const std::function<void(comm::Group&)>& body,
                      std::chrono::milliseconds timeout = kSlowdown * std::chrono::seconds(20),
                      comm::ConsistencyCheck check_consistency = comm::ConsistencyCheck::kFirst) {
  if (ranks_are_processes(backend)) return run_as_rank(size, backend, body, timeout, check_consistency);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        comm::Group group =
            comm::make_group(store, rank, size, backend, timeout, "127.0.0.1", check_consistency);
        body(group);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace cohort::test

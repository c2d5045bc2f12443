#pragma once

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "cohort/comm/group.h"

namespace cohort::test {

/// Runs body(group) on `size` threads, each a rank of one group, and returns when all have ended. What rank
/// 0, or the lowest rank that failed, threw is thrown on.
inline void run_ranks(int size, const std::string& backend, const std::function<void(comm::Group&)>& body,
                      std::chrono::milliseconds timeout = std::chrono::seconds(20),
                      comm::Check check = comm::Check::kFirst) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        comm::Group group = comm::make_group(store, rank, size, backend, timeout, "127.0.0.1", check);
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

#pragma once

#include <c10/util/intrusive_ptr.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace bench_rpc {

using Store = c10::intrusive_ptr<c10d::Store>;

/// Runs body(rank, store) in two processes, and returns what rank 0's returned. This process has no threads yet.
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

}  // namespace bench_rpc

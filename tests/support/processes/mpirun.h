#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/launch/worker.h"
#include "tests/support/slowdown.h"
#include "tests/support/temp_dir.h"

/// Runs a program under mpirun, on more ranks than there are cores if need be, as root too.
namespace cohort::test {

/// Under AddressSanitizer: without looking for leaks. Open MPI has many, in plug-ins that it has unloaded by
/// then, so that no suppression can name them.
inline launch::Variables with_leaks_of_mpi(launch::Variables variables = {}) {
  const char* const options = std::getenv("ASAN_OPTIONS");
  if (options != nullptr) variables.emplace_back("ASAN_OPTIONS", std::string(options) + ":detect_leaks=0");
  return variables;
}

/// A running `mpirun -n RANKS COMMAND...`. Killed with its ranks when it goes.
class MpiJob {
 public:
  MpiJob(const std::filesystem::path& folder, int ranks, const std::vector<std::string>& command,
         const launch::Variables& variables = {})
      : output_(folder / "mpirun.log") {
    std::vector<std::string> words{
        COHORT_MPIRUN, "-n",     std::to_string(ranks), "--allow-run-as-root", "--oversubscribe", "--bind-to",
        "none",        "--wdir", folder.string()};
    words.insert(words.end(), command.begin(), command.end());
    const launch::Fd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const launch::Fd output(
        ::open(output_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
    worker_ = std::make_unique<launch::Worker>(
        launch::WorkerOptions{.program = COHORT_MPIRUN,
                              .arguments = words,
                              .environment = launch::environment_with(with_leaks_of_mpi(variables)),
                              .input = nothing.get(),
                              .output = output.get(),
                              .error = output.get(),
                              .own_group = true});
  }

  launch::Worker& worker() { return *worker_; }
  /// What all ranks and mpirun have written to stdout and stderr so far.
  std::string output() const { return read_file(output_); }

  /// Its exit status; -1, and a failure of the test, when it has not ended within `timeout`.
  int wait(std::chrono::milliseconds timeout = kSlowdown * std::chrono::minutes(2)) {
    const base::Deadline deadline(timeout);
    while (!worker_->reap()) {
      if (deadline.expired()) {
        ADD_FAILURE() << "mpirun did not end within " << timeout.count() << " ms:\n" << output();
        worker_->signal(SIGTERM);  // it ends its ranks
        std::this_thread::sleep_for(std::chrono::seconds(5));
        return -1;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return launch::exit_status(worker_->wait_status());
  }

 private:
  std::filesystem::path output_;
  std::unique_ptr<launch::Worker> worker_;
};

}  // namespace cohort::test

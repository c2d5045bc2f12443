#pragma once

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cohort/launch/worker.h"
#include "tests/support/net/port.h"
#include "tests/support/processes/process_state.h"
#include "tests/support/temp_dir.h"

/// Runs `cohort run` as a shell does.
namespace cohort::test {

inline launch::Fd open_for_writing(const std::filesystem::path& path) {
  return launch::Fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
}

/// A running `cohort run ...` that leads a process group, as a shell starts it.
class Job {
 public:
  /// `before` are words in front of the program: ip netns exec NAME.
  Job(const std::filesystem::path& folder, std::vector<std::string> arguments,
      std::vector<std::string> before = {}) {
    static int counter = 0;
    out_ = folder / ("out" + std::to_string(++counter));
    err_ = folder / ("err" + std::to_string(counter));
    const launch::Fd out = open_for_writing(out_), err = open_for_writing(err_);
    arguments.insert(arguments.begin(), {COHORT_PROGRAM, "run"});
    arguments.insert(arguments.begin(), before.begin(), before.end());
    worker_ = std::make_unique<launch::Worker>(
        launch::WorkerOptions{.program = launch::find_program(arguments.front()),
                              .arguments = arguments,
                              .environment = launch::environment_with({{"FOLDER", folder.string()}}),
                              .output = out.get(),
                              .error = err.get(),
                              .own_group = true});
  }
  launch::Worker& worker() { return *worker_; }
  std::string out() const { return read_file(out_); }
  std::string err() const { return read_file(err_); }

  /// Its exit status, within two minutes.
  int wait() {
    for (int i = 0; i < 12000 && !worker_->reap(); ++i) ::poll(nullptr, 0, 10);
    if (worker_->running()) throw std::runtime_error("the job did not end: " + err());
    return launch::exit_status(worker_->wait_status());
  }

 private:
  std::filesystem::path out_, err_;
  std::unique_ptr<launch::Worker> worker_;
};

inline bool comes(const std::filesystem::path& file) {
  for (int i = 0; i < 6000 && !std::filesystem::exists(file); ++i) ::poll(nullptr, 0, 10);
  return std::filesystem::exists(file);
}

}  // namespace cohort::test

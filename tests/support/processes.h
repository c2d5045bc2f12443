#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "tests/support/net/port.h"
#include "tests/support/processes/process_state.h"
#include "tests/support/temp_dir.h"

namespace cohort::test {

/// The ranks of a job as processes: this executable again, running one test that is written for it
/// (`TEST(XChild, DISABLED_Y)`, the only one of XChild), in torchrun's environment. Killed when this object
/// goes, or this process.
class RankProcesses {
 public:
  RankProcesses(const std::string& child, int size,
                const std::vector<std::pair<std::string, std::string>>& extra = {}) {
    const std::string port = std::to_string(free_port());
    for (int rank = 0; rank < size; ++rank) {
      auto variables = extra;
      variables.insert(variables.end(), {{"RANK", std::to_string(rank)},
                                         {"WORLD_SIZE", std::to_string(size)},
                                         {"LOCAL_RANK", std::to_string(rank)},
                                         {"LOCAL_WORLD_SIZE", std::to_string(size)},
                                         {"MASTER_ADDR", "127.0.0.1"},
                                         {"MASTER_PORT", port},
                                         {"COHORT_LOG", "info"},
                                         {"TEST_FOLDER", folder_.path().string()}});
      start(child, variables, output_path(rank));
    }
  }
  ~RankProcesses() {
    for (const pid_t pid : running_) {
      if (pid > 0) ::kill(pid, SIGKILL);
      if (pid > 0) ::waitpid(pid, nullptr, 0);
    }
  }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  void send(int rank, int signal) { ::kill(running_.at(static_cast<std::size_t>(rank)), signal); }
  /// Whether SIGSTOP holds `rank`.
  bool is_stopped(int rank) const { return test::is_stopped(running_.at(static_cast<std::size_t>(rank))); }
  std::string output(int rank) const {
    return std::filesystem::exists(output_path(rank)) ? read_file(output_path(rank)) : "";
  }
  /// Of files that ranks write: children find it as TEST_FOLDER.
  const std::filesystem::path& folder() const { return folder_.path(); }

  /// Waits until `rank` has written `text`; fails the test after half a minute.
  void wait_for(int rank, const std::string& text) {
    const base::Deadline deadline(std::chrono::seconds(30));
    while (output(rank).find(text) == std::string::npos) {
      if (deadline.expired()) {
        ADD_FAILURE() << "rank " << rank << " did not write \"" << text << "\", but:\n" << output(rank);
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  /// Returns the exit statuses of all; -1 for those that ended by a signal or had to be killed at the
  /// deadline.
  std::vector<int> wait(std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    const base::Deadline deadline(timeout);
    std::vector<int> statuses(running_.size(), -1);
    for (std::size_t rank = 0; rank < running_.size(); ++rank) {
      int status = 0;
      pid_t ended = 0;
      while ((ended = ::waitpid(running_[rank], &status, WNOHANG)) == 0 && !deadline.expired()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      if (ended == 0) continue;  // the destructor ends it
      if (WIFEXITED(status)) statuses[rank] = WEXITSTATUS(status);
      running_[rank] = -1;
    }
    return statuses;
  }

 private:
  std::string output_path(int rank) const { return (folder_ / ("output " + std::to_string(rank))).string(); }

  void start(const std::string& child, const std::vector<std::pair<std::string, std::string>>& variables,
             const std::string& output) {
    const std::string filter = "--gtest_filter=" + child + ".*";
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork failed");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int out = ::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
      if (::getppid() != parent || out < 0 || ::dup2(out, 1) < 0 || ::dup2(out, 2) < 0) ::_exit(126);
      for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
      ::execl("/proc/self/exe", "test", filter.c_str(), "--gtest_also_run_disabled_tests",
              static_cast<char*>(nullptr));
      ::_exit(127);
    }
    running_.push_back(pid);
  }

  TempDir folder_;
  std::vector<pid_t> running_;
};

}  // namespace cohort::test

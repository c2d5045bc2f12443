#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "tests/support/temp_dir.h"

/// Runs the built program `cohort` as a user does, in a folder of the test's own.
namespace cohort::test {

struct Outcome {
  int status = -1;  ///< exit status, or 128 + N when signal N ended it
  std::string out;
  std::string err;
};

/// A running `cohort ARGUMENTS...`. Killed and reaped when it goes out of scope.
class Program {
 public:
  using Variables = std::vector<std::pair<std::string, std::string>>;

  /// `output`: where it writes, or -1: files.
  Program(const std::filesystem::path& folder, const std::vector<std::string>& arguments,
          const Variables& environment = {}, int output = -1)
      : out_(folder / ("out-" + std::to_string(++counter()))),
        err_(folder / ("err-" + std::to_string(counter()))) {
    pid_ = fork();
    if (pid_ < 0) throw std::runtime_error("fork failed");
    if (pid_ == 0) {
      const int out = open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
      const int err = open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
      dup2(output >= 0 ? output : out, STDOUT_FILENO);
      dup2(output >= 0 ? output : err, STDERR_FILENO);
      std::vector<char*> argv{const_cast<char*>(COHORT_PROGRAM)};
      for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
      argv.push_back(nullptr);
      for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
      if (chdir(folder.c_str()) == 0) execv(COHORT_PROGRAM, argv.data());
      _exit(127);
    }
  }
  ~Program() {
    if (running_) {
      ::kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void signal(int number) const { ::kill(pid_, number); }

  /// The first process that this one has started whose environment has `variable`, "RANK=1"; -1: there is
  /// none.
  pid_t child_with(const std::string& variable) const {
    const std::string pid = std::to_string(pid_);
    std::istringstream children(read_file("/proc/" + pid + "/task/" + pid + "/children"));
    for (pid_t child = 0; children >> child;) {
      const std::string variables = '\0' + read_file("/proc/" + std::to_string(child) + "/environ");
      if (variables.find('\0' + variable + '\0') != std::string::npos) return child;
    }
    return -1;
  }

  /// True once the process has ended within `timeout`.
  bool wait_for(std::chrono::milliseconds timeout) {
    const auto end = std::chrono::steady_clock::now() + timeout;
    while (running_ && std::chrono::steady_clock::now() < end) {
      int status = 0;
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        running_ = false;
        status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    }
    return !running_;
  }

  /// What it came to. Throws when it has not ended after two minutes.
  Outcome outcome() {
    if (!wait_for(std::chrono::minutes(2)))
      throw std::runtime_error("the program did not end within two minutes");
    return {status_, read_file(out_), read_file(err_)};
  }

  std::string err_so_far() const { return read_file(err_); }

 private:
  static int& counter() {
    static int value = 0;
    return value;
  }

  std::filesystem::path out_, err_;
  pid_t pid_ = -1;
  bool running_ = true;
  int status_ = -1;
};

inline Outcome run_program(const std::filesystem::path& folder, const std::vector<std::string>& arguments) {
  return Program(folder, arguments).outcome();
}

/// From now on what a program leaves behind becomes a child of this process.
inline void adopt_orphans() {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

/// True once all children of this process are gone, within twenty seconds.
inline bool nothing_is_left() {
  const base::Deadline deadline(std::chrono::seconds(20));
  while (::waitpid(-1, nullptr, WNOHANG) >= 0 || errno != ECHILD) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// The rows of a metrics.csv, in the columns that do not hold times.
inline std::vector<std::string> columns_without_times(const std::filesystem::path& csv) {
  std::vector<std::string> rows;
  std::vector<std::string> header;
  for (const std::string& line : lines_of(read_file(csv))) {
    std::istringstream cells(line);
    std::string row;
    std::size_t column = 0;
    for (std::string cell; std::getline(cells, cell, ','); ++column) {
      if (rows.empty() && header.size() == column) header.push_back(cell);
      const std::string& name = header.at(column);
      if (name == "seconds" || name == "samples_per_second" || name == "data_wait") continue;
      row += cell + ",";
    }
    rows.push_back(row);
  }
  return rows;
}

/// `cohort train` on made-up images: momentum, batch norm, a schedule by step, two workers. 5 epochs of 8
/// steps, or of 4 on two ranks, whose last batch of 13 they cannot share evenly.
class TrainProgramTest : public ::testing::Test {
 protected:
  void SetUp() override {
    write_file(dir / "job.yaml", R"(
model: {name: vgg11_bn, width: 0.05, pools: 4, head: linear}
data: {type: synthetic, synthetic_train: 61, synthetic_val: 21, image_size: 16, color: gray, workers: 2}
optim: {lr: 0.05, momentum: 0.9}
schedule: {name: cosine, warmup_steps: 4}
train: {epochs: 5, batch_size: 8, threads: 1, device: cpu}
comm: {timeout: 60}
run: {save_every_steps: 3, log_every: 2, keep: 2}
)");
  }

  static std::vector<std::string> train(const std::string& folder,
                                        const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments{"train", "--config", "job.yaml", "run.dir=" + folder};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  Outcome run(const std::vector<std::string>& arguments) { return run_program(dir.path(), arguments); }
  /// The parameters that the run in `folder` saved last.
  std::string model(const std::string& folder) {
    return read_file(dir / folder / "checkpoints" / "last" / "model.safetensors");
  }
  /// Waits until the run in `folder` has a checkpoint, or has ended.
  void wait_for_checkpoint(Program& program, const std::string& folder) {
    while (!std::filesystem::exists(dir / folder / "checkpoints" / "last") &&
           !program.wait_for(std::chrono::milliseconds(10))) {
    }
  }

  TempDir dir;
};

}  // namespace cohort::test

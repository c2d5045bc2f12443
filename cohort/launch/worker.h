#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/cpu.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/launch/limits.h"
#include "cohort/launch/pipe.h"

/// One process that is started, watched and ended here. No LibTorch.
namespace cohort::launch {

class OrphanWatchdog;

/// What a process is started with.
struct WorkerOptions {
  std::string program;                        ///< path of the executable
  std::vector<std::string> arguments = {};    ///< its name first
  std::vector<std::string> environment = {};  ///< NAME=VALUE, all of it
  base::CpuSet cpus = {};                     ///< where it may run; empty: where the caller may
  int input = -1;                             ///< becomes its stdin, as the next two; -1: the caller's own
  int output = -1;
  int error = -1;
  std::vector<int> keep = {};  ///< descriptors that it inherits under their numbers; no others
  bool own_group = false;      ///< leads a process group, which is killed when it has ended
  /// Told of that group before the program runs; who reaps calls forget().
  OrphanWatchdog* watchdog = nullptr;
  base::Deadline start_by = base::Deadline(kStartTime);  ///< that it runs, which a file system may hold up
};

/// A process started by fork and exec, with no signal blocked. It dies when the thread that made it ends
/// (the kernel sends SIGKILL), and is killed and reaped when this object goes. Threads: one caller at a time.
class Worker {
 public:
  /// The program runs. Throws: SystemError with the reason when it cannot be executed, or does not run in
  /// time.
  explicit Worker(const WorkerOptions& options);
  Worker(Worker&& other) noexcept;
  Worker& operator=(Worker&&) = delete;
  ~Worker();

  /// Its number, also once it has ended; another process may have it then.
  pid_t pid() const { return pid_; }
  /// False once it was reaped, or given up by end().
  bool running() const { return running_; }
  /// True once it has ended and was reaped; what is left of its process group is killed then.
  /// Where somebody else has taken its status away (SIGCHLD is ignored in this process), it counts as failed
  /// with status 1, and the log says so.
  bool reap();
  /// Sends a signal to it, not to its group.
  void signal(int number) const;
  /// Sends a signal to it and to its group.
  void signal_group(int number) const;
  /// Sends SIGKILL to it and to its group.
  void kill() const;
  /// Kills it and waits for its end, which the kernel may hold up: until the deadline.
  void end(base::Deadline deadline);
  /// As waitpid() gives it; for one that has ended.
  int wait_status() const { return wait_status_; }
  /// Readable once it has ended; -1 where the kernel cannot say.
  int end_fd() const { return end_.get(); }

 private:
  pid_t pid_ = -1;
  bool own_group_ = false;
  bool running_ = false;
  int wait_status_ = 0;
  Fd end_;
};

/// Returns the status as a shell shows it: 128 + N when signal N ended the process.
int exit_status(int wait_status);

/// Returns "ended with status 3" or "was killed by signal 9 (Killed)".
std::string describe_exit(int wait_status);

/// Returns what this process was called with, its name first. Throws: SystemError without /proc.
std::vector<std::string> own_arguments();

/// Names and values of environment variables.
using Variables = std::vector<std::pair<std::string, std::string>>;

/// Returns this process's environment with `added` in place of variables of the same names.
std::vector<std::string> environment_with(const Variables& added);

/// Where a rank stands in its job.
/// Ranks count over the whole job, local ranks on one node; the rest is what torchrun's variables of those
/// names hold.
struct RankPlace {
  int rank = 0;
  int local_rank = 0;
  int world_size = 1;
  int local_world_size = 1;
  int node_rank = 0;
  std::string master_addr;
  std::uint16_t master_port = 0;
  int restart_count = 0;
};

/// Returns the variables by which torchrun tells a rank its place, and OMP_NUM_THREADS, its share of the
/// cores, where this process has none.
Variables variables_of(const RankPlace& place);

/// Returns the path of a program as a shell finds it, through PATH when the name has no slash.
/// Throws: UsageError when there is none that can be executed.
std::string find_program(const std::string& name);

}  // namespace cohort::launch

#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <utility>

#include "cohort/base/threads/deadline.h"
#include "cohort/comm/backends/mpi/internal/inbox.h"
#include "cohort/comm/backends/mpi/internal/process.h"
#include "cohort/comm/backends/mpi/internal/progress.h"
#include "cohort/comm/backends/mpi/internal/work.h"

/// The one thread of this process that calls MPI, from MPI_Init to MPI_Finalize.
///
/// Calls are handed to it as steps: each begins requests that do not block, and the next step runs when they
/// are done. So each collective and message has a deadline; one that passes ends the job. Making a
/// group (MPI_Comm_create_group) has none: it blocks the thread, and the caller of run() stops waiting at its
/// own.
namespace cohort::comm::mpi {

/// Threads: any may call, except from a step.
class Engine {
 public:
  /// Starts MPI at the first call of the process. Throws: UsageError when the program has started MPI itself
  /// without MPI_THREAD_MULTIPLE; TimeoutError when other processes of the job do not start it too.
  static Engine& start(base::Deadline deadline);

  /// Never changes.
  const Process& process() const { return process_; }

  void submit(MpiWorkPtr call) { inbox_.add_call(std::move(call)); }
  /// Runs `task`, which blocks, on the engine's thread, once the collectives that were begun are over: other
  /// ranks may need all their steps before they come to the same. Returns when it has run; throws what it
  /// threw, and TimeoutError saying that `what` takes too long.
  void run(std::function<void()> task, base::Deadline deadline, const char* what);
  /// Runs `task` there some time, or never when MPI is over.
  void post(std::function<void()> task) { inbox_.add_task(std::move(task)); }
  /// At exit a rank waits for the others for at most the longest timeout that was set.
  void set_exit_timeout(std::chrono::milliseconds timeout) { inbox_.set_exit_timeout(timeout); }

 private:
  Engine() = default;
  void begin();
  void loop();
  bool take_new();
  bool run_blocking();
  void pause(bool has_moved);
  [[noreturn]] void end_job(const std::string& why);
  void finalize();
  void at_exit(int status);

  Process process_;                  // set by the engine's thread before start() returns
  Inbox inbox_;                      // of any thread
  std::atomic<bool> failed_{false};  // a call or a task; callers of run() set it too, and who exits reads it
  Progress progress_{failed_};       // of the engine's thread alone
};

}  // namespace cohort::comm::mpi

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "cohort/base/threads/deadline.h"
#include "cohort/comm/backends/mpi/internal/inbox.h"
#include "cohort/comm/backends/mpi/internal/progress.h"
#include "cohort/comm/backends/mpi/internal/work.h"

/// The one thread of this process that calls MPI, from MPI_Init to MPI_Finalize.
///
/// Calls are handed to it as steps: each begins requests that do not block, and the next step runs when they
/// are done. So each collective and message has a deadline; one that passes ends the job. Making a
/// group (MPI_Comm_create_group) has none: it blocks the thread, and the caller of run() stops waiting at its
/// own.
namespace cohort::comm::mpi {

/// This process, as MPI knows it. Never changes after begin().
struct MpiProcess {
  int rank = 0;
  int size = 1;
  int largest_tag = 32767;
  std::uint64_t job = 0;  ///< the same on all ranks of the job that mpirun has started, and nowhere else
  bool is_owner = false;  ///< MPI was started here and ends here

  /// Starts MPI, or joins one that the program has started. Threads: the engine's. Throws: as Engine::start.
  static MpiProcess begin();
};

/// Threads: any may call, except from a step.
class Engine {
 public:
  /// Starts MPI at the first call of the process. Throws: UsageError when the program has started MPI itself
  /// without MPI_THREAD_MULTIPLE; TimeoutError when other processes of the job do not start it too.
  static Engine& start(base::Deadline deadline);

  int rank() const { return process_.rank; }
  int size() const { return process_.size; }
  /// The same on all ranks of the job that mpirun has started, and nowhere else.
  std::uint64_t job() const { return process_.job; }
  int largest_tag() const { return process_.largest_tag; }

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

  MpiProcess process_;               // set by the engine's thread before start() returns
  Inbox inbox_;                      // of any thread
  std::atomic<bool> failed_{false};  // a call or a task; callers of run() set it too, and who exits reads it
  Progress progress_{failed_};       // of the engine's thread alone
};

}  // namespace cohort::comm::mpi

#pragma once

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/comm/internal/cpu_call.h"

/// The one thread of this process that calls MPI, from MPI_Init to MPI_Finalize.
///
/// Calls are handed to it as steps: each begins requests that do not block, and the next step runs when they
/// are done. So each collective and message has a deadline; one that passes ends the job. Making a
/// group (MPI_Comm_create_group) has none: it blocks the thread, and the caller of run() stops waiting at its
/// own.
namespace cohort::comm::mpi {

/// The requests that a step has begun.
struct PendingRequests {
  std::vector<MPI_Request> requests;
  std::vector<std::int64_t> expected;  ///< bytes to receive, of each request; -1: MPI sees to it

  MPI_Request* add(std::int64_t bytes = -1) {
    expected.push_back(bytes);
    return &requests.emplace_back(MPI_REQUEST_NULL);
  }
};

/// Throws std::runtime_error with MPI's words.
void check(int code, const char* function);

/// Calls of one group that go one after the other, as MPI asks of collectives.
struct OrderedQueue {
  std::deque<const void*> calls;
  std::unique_ptr<std::byte[]> memory;
  std::size_t bytes = 0;

  /// Memory for the step that runs and those after it in the same call.
  std::byte* scratch(std::size_t size);
};

/// Whose call it is, for errors.
struct CallGroup {
  std::string name;
  int rank = 0;
  int size = 1;
};

/// A call that was begun. All but what c10d asks belongs to the engine.
class MpiWork : public CpuWork {
 public:
  using Step = std::function<void(PendingRequests&)>;

  /// `queue` may be null: a message, which waits for nothing but its peer.
  MpiWork(CpuCall call, CallGroup group, std::vector<Step> steps, std::shared_ptr<OrderedQueue> queue);

  /// Where the deadline passes, or `timeout`, it throws, and the job ends soon after.
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return source_.load(); }
  std::uint64_t getSequencenumber() const override { return call_.number; }

 private:
  friend class Engine;
  bool is_late() const { return deadline_.expired() || is_cut_short_.load(); }
  std::string describe() const;
  /// Runs on until it has to wait; true once all steps are done.
  bool advance();
  bool has_arrived();
  /// After an error MPI may still read and write the tensors, which are kept for it.
  void end(std::exception_ptr error);

  CpuCall call_;
  const CallGroup group_;
  std::vector<Step> steps_;
  std::size_t next_ = 0;
  PendingRequests pending_;
  std::vector<MPI_Status> statuses_;
  base::Deadline deadline_;
  std::shared_ptr<OrderedQueue> queue_;
  std::atomic<bool> is_cut_short_{false};  // somebody waited for less than the deadline
  std::atomic<int> source_{-1};
};
using MpiWorkPtr = c10::intrusive_ptr<MpiWork>;

/// Threads: any may call, except from a step.
class Engine {
 public:
  /// Starts MPI at the first call of the process. Throws: UsageError when the program has started MPI itself
  /// without MPI_THREAD_MULTIPLE; TimeoutError when other processes of the job do not start it too.
  static Engine& start(base::Deadline deadline);

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The same on all ranks of the job that mpirun has started, and nowhere else.
  std::uint64_t job() const { return job_; }
  int largest_tag() const { return largest_tag_; }

  void submit(MpiWorkPtr call);
  /// Runs `task`, which blocks, on the engine's thread, once the collectives that were begun are over: other
  /// ranks may need all their steps before they come to the same. Returns when it has run; throws what it
  /// threw, and TimeoutError saying that `what` takes too long.
  void run(std::function<void()> task, base::Deadline deadline, const char* what);
  /// Runs `task` there some time, or never when MPI is over.
  void post(std::function<void()> task);
  /// At exit a rank waits for the others for at most the longest timeout that was set.
  void set_exit_timeout(std::chrono::milliseconds timeout);

 private:
  Engine() = default;
  void begin();
  void loop();
  bool take_new();
  bool run_blocking();
  bool advance_calls();
  void check_deadlines();
  void pause(bool moved);
  void end_late(MpiWork& call);
  [[noreturn]] void end_job(const std::string& why);
  void finalize();
  void at_exit(int status);

  int rank_ = 0, size_ = 1, largest_tag_ = 32767;
  std::uint64_t job_ = 0;
  bool owner_ = false;  // MPI was started here and ends here

  std::mutex mutex_;
  std::condition_variable changed_;  // for the engine's thread
  std::condition_variable ended_;    // for who exits
  std::vector<MpiWorkPtr> new_calls_;
  std::vector<std::function<void()>> tasks_, blocking_tasks_;
  bool stopping_ = false, over_ = false;
  std::chrono::milliseconds exit_timeout_{0};

  // A call or a task failed. Callers of run() set it too, and the thread that exits reads it.
  std::atomic<bool> failed_{false};

  // The engine's thread alone.
  std::vector<MpiWorkPtr> running_;
  std::optional<base::Deadline> abort_at_;
  std::string abort_because_;
  base::Deadline::Clock::time_point last_moved_;
};

}  // namespace cohort::comm::mpi

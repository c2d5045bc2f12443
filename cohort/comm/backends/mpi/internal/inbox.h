#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/comm/backends/mpi/internal/work.h"

/// What other threads hand to the engine's thread. Internal.
namespace cohort::comm::mpi {

/// New calls and tasks, and the word that the process exits.
///
/// Always: a task runs once or, where MPI is over, never; calls are taken in the order in which they came.
/// Threads: any for the first part, under the mutex; the second part is the engine's thread's.
class Inbox {
 public:
  using Task = std::function<void()>;

  void add_call(MpiWorkPtr call);
  /// Dropped where MPI is over.
  void add_task(Task task);
  /// Of a task that may block; dropped where MPI is over.
  void add_blocking_task(Task task);
  /// At exit a rank waits for the others for at most the longest of these.
  void set_exit_timeout(std::chrono::milliseconds timeout);
  std::chrono::milliseconds exit_timeout() const;
  /// Tells the engine's thread to end, and waits until it has closed this, for `grace` and, where asked, the
  /// exit timeout at most.
  void stop(std::chrono::milliseconds grace, bool add_exit_timeout);

  struct News {
    std::vector<MpiWorkPtr> calls;
    std::vector<Task> tasks;
  };
  /// Takes all that is new, but for tasks that block.
  News take();
  /// Takes the next task that blocks; nothing where there is none, or a call was not taken yet.
  Task take_blocking_task();
  bool is_stopping() const;
  /// Waits until something is new, for `most` at most.
  void wait(std::chrono::microseconds most);
  /// MPI is over.
  void close();

 private:
  mutable std::mutex mutex_;         // of all that follows
  std::condition_variable changed_;  // for the engine's thread
  std::condition_variable ended_;    // for who exits
  std::vector<MpiWorkPtr> calls_;
  std::vector<Task> tasks_, blocking_tasks_;
  bool is_stopping_ = false, is_over_ = false;
  std::chrono::milliseconds exit_timeout_{0};
};

}  // namespace cohort::comm::mpi

#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/comm/backends/shm/internal/collectives.h"
#include "cohort/comm/backends/shm/internal/communicator.h"
#include "cohort/comm/backends/shm/internal/messages.h"

namespace cohort::comm::shm {

/// Something that was begun: a collective or a message.
struct Operation {
  explicit Operation(base::Deadline end) : deadline(end) {}

  const char* call = "";  ///< for errors, as what follows
  std::uint64_t number = 0;
  base::Deadline deadline;
  std::function<Task()> make;  ///< called once, when those before it are over
  bool is_message = false;     ///< does not wait for those before it
  Rounds rounds = Rounds::kMany;
  std::shared_ptr<void> keep;  ///< lives until it is over
  int source = -1;             ///< the sender of a message that is received, once it is over

  std::atomic<bool> over{false};
  std::exception_ptr error;  ///< once it is over

  Task task;                                                      ///< of the engine, as what follows
  std::optional<std::chrono::steady_clock::time_point> asked_at;  ///< when the others were, first of all
  std::function<void()> when_over;
};

/// Runs what was begun, in order: on the thread that waits for it, and on one of its own for what nobody
/// waits for.
///
/// Note [Progress lock]: one thread at a time holds the progress lock. It advances tasks, and spins and
/// sleeps in between. What begins is advanced once by its caller, if the lock is free. Where one round is
/// then all that the others need, the rest is left to wait(); a second round, which some calls have, is the
/// progress thread's once another rank waits for it so long that it would sleep: it asks. Anything longer,
/// and what has a future, is the progress thread's at once, unless wait() comes first. To wake that thread
/// takes some microseconds, more than such a call. Threads: any.
class Engine {
 public:
  explicit Engine(std::unique_ptr<Communicator> ranks);
  /// Returns one that any thread may release, also in a callback.
  static std::shared_ptr<Engine> make(std::unique_ptr<Communicator> ranks);
  /// What is not over fails. Not on the progress thread.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Communicator& ranks() { return *ranks_; }
  Messages& messages() { return messages_; }

  /// Throws: CommError after an earlier failure, with its text.
  void begin(const std::shared_ptr<Operation>& operation);
  /// Blocks until it is over, at most until `deadline`, which ends the wait and not the operation.
  /// Throws: what it failed with; TimeoutError.
  void wait(Operation& operation, base::Deadline deadline);
  /// Whether it is over.
  bool test(Operation& operation);
  /// Calls `body` once it is over: now, or on the thread that notices, which may begin and wait for others.
  void when_over(Operation& operation, std::function<void()> body);
  /// Everything that is not over fails with this.
  void cancel(const std::string& why);

 private:
  void request_progress();
  void wake_progress_thread();
  void ask_others();
  bool others_were_asked_just_now() const;
  bool can_lock_progress() const;
  bool try_lock_progress();
  void unlock_progress();
  bool advance_all();
  bool is_idle() const;
  template <typename Until>
  void progress_until(const Until& until);
  bool spin();
  std::chrono::nanoseconds sleep_time() const;
  void look_for_faults();
  Operation* first_late() const;
  bool advance(Operation& operation);
  std::string name_of(const Operation& operation) const;
  void finish(Operation& operation, std::exception_ptr error);
  void fail_all(const std::exception_ptr& error, const std::string& why);
  void run();

  const std::unique_ptr<Communicator> ranks_;
  Messages messages_;

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  bool is_progress_locked_ = false;
  bool is_progress_wanted_ = false;  // progress
  bool stopped_ = false;
  int waiting_ = 0;
  std::string broken_;
  std::deque<std::shared_ptr<Operation>> begun_;
  std::atomic<bool> any_begun_{false};
  std::atomic<bool> stop_{false};

  // Of the thread that holds the progress lock.
  std::vector<std::function<void()>> callbacks_;  // called when it releases the lock
  std::chrono::steady_clock::time_point looked_{};
  std::deque<std::shared_ptr<Operation>> collectives_;
  std::list<std::shared_ptr<Operation>> running_messages_;

  std::thread thread_;
};

}  // namespace cohort::comm::shm

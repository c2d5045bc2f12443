#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "cohort/base/cpu.h"
#include "cohort/base/threads/deadline.h"

/// A thread that does what it is given, in order, on cores of its own. No LibTorch.
///
///     base::TaskThread thread({.name = "cpu:1", .cpus = base::CpuSet::parse("1")});
///     base::Pending<int> answer = thread.submit("answer", [] { return 42; });
///     int n = answer.get(base::Deadline(30s));       // what the function threw comes out here
namespace cohort::base {

namespace task_detail {

struct Shared;

// One piece of work: who waits for it and who does it share this.
class PendingTask {
 public:
  explicit PendingTask(const char* what) : what_(what) {}
  virtual ~PendingTask() = default;
  PendingTask(const PendingTask&) = delete;
  PendingTask& operator=(const PendingTask&) = delete;

  bool done() const { return done_.load(std::memory_order_acquire); }
  bool wait(Deadline deadline);
  void wait_or_throw(Deadline deadline);
  bool abandon();  // false where it is done
  void run() noexcept;
  void finish(std::exception_ptr error) noexcept;

  const char* what() const { return what_; }

 protected:
  virtual void execute() = 0;
  virtual void drop() noexcept = 0;

 private:
  friend struct Shared;

  const char* what_;
  std::shared_ptr<Shared> thread_;
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::condition_variable finished_;
  std::exception_ptr error_;  // written before done_
  bool is_running_ = false;   // under mutex_, as below
  bool is_abandoned_ = false;
};

template <typename T>
class ValueWork : public PendingTask {
 public:
  using PendingTask::PendingTask;
  std::optional<T> value;
};
template <>
class ValueWork<void> : public PendingTask {
 public:
  using PendingTask::PendingTask;
};

template <typename T, typename Fn>
class FunctionWork final : public ValueWork<T> {
 public:
  FunctionWork(const char* what, Fn fn) : ValueWork<T>(what), fn_(std::in_place, std::move(fn)) {}

 protected:
  void execute() override {
    if constexpr (std::is_void_v<T>) {
      std::invoke(*fn_);
    } else {
      this->value.emplace(std::invoke(*fn_));
    }
  }
  void drop() noexcept override { fn_.reset(); }

 private:
  std::optional<Fn> fn_;
};

}  // namespace task_detail

/// What a function will have returned once its thread has run it. Threads: one waits.
template <typename T>
class Pending {
 public:
  Pending() = default;
  explicit Pending(std::shared_ptr<task_detail::ValueWork<T>> work) : work_(std::move(work)) {}

  bool valid() const { return work_ != nullptr; }
  bool ready() const { return work_->done(); }
  /// Returns whether it was done before the deadline. Throws: UsageError at once where the calling thread and
  /// the other would wait for each other; not where the deadline has passed already.
  bool wait(Deadline deadline) const { return work_->wait(deadline); }
  /// Nobody waits any more: the thread is late until this is done. False where it is done: get() says how.
  bool abandon() const { return work_->abandon(); }
  /// Returns the value, once, or throws what the function threw.
  /// Throws: TimeoutError naming the thread and what it is busy with; the function itself continues, and the
  /// thread is late until it ends. UsageError as wait() does; the function still runs.
  T get(Deadline deadline) {
    work_->wait_or_throw(deadline);
    const auto work = std::exchange(work_, nullptr);
    if constexpr (!std::is_void_v<T>) return std::move(*work->value);
  }

 private:
  std::shared_ptr<task_detail::ValueWork<T>> work_;
};

class TaskThread {
 public:
  struct Options {
    std::string name = "worker";  ///< in the timeline and in messages
    CpuSet cpus = {};             ///< where it runs; empty: wherever its maker may
    /// How long it looks for more work before it sleeps, and a waiter for the result. A thread that shares
    /// its cores with another TaskThread sleeps at once: it would look on the other's time.
    std::chrono::microseconds spin{50};
    /// Runs first on the thread; what it throws comes out of the constructor.
    std::function<void()> start = nullptr;
    std::chrono::milliseconds start_time = std::chrono::minutes(1);  ///< that it may take
  };

  /// Throws: TimeoutError where the thread has not begun in time; it is left behind then, and ends after
  /// `start`.
  explicit TaskThread(Options options);
  /// stop() with five seconds' patience; with none where the thread is late, so that it was waited for.
  ~TaskThread();
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  /// Has the thread run `fn` after all that it was given before; `what`, a literal, names it in the timeline
  /// and in messages. The function is destroyed on the thread before its result is there, and by stop() where
  /// the thread is left behind before it comes to it. Threads: any.
  template <typename Fn>
  auto submit(const char* what, Fn fn) {
    using T = std::invoke_result_t<Fn&>;
    auto work = std::make_shared<task_detail::FunctionWork<T, Fn>>(what, std::move(fn));
    post(work);
    return Pending<T>(std::move(work));
  }

  const std::string& name() const;
  /// Whether the calling thread is this one.
  bool is_current() const;
  /// Whether another TaskThread may run on one of its cores; of those that were given cores.
  bool shares_cores() const;
  /// Whether there is a function, begun or not, that it has not ended and that nobody waits for any more: a
  /// get() timed out, or it was abandoned.
  bool is_late() const;
  /// Whether nobody waits any more for the function that it runs: it was given up itself, or its Pending is
  /// gone and another was given up behind it. One that is late and not stuck has somebody who waits for what
  /// it runs now.
  bool is_stuck() const;
  /// Runs what was given, then ends. A thread that is still busy when `patience` is over is left behind: it
  /// ends after the function that it is in, and what waits behind that fails. Returns whether it has ended.
  bool stop(std::chrono::milliseconds patience);

 private:
  void post(std::shared_ptr<task_detail::PendingTask> work);

  std::shared_ptr<task_detail::Shared> shared_;
  std::thread thread_;
};

}  // namespace cohort::base

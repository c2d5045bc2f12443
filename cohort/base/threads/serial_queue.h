#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "cohort/base/cpu.h"
#include "cohort/base/threads/task.h"

/// Functions that run one after another, in the order in which they were given, on a thread of their own.
/// No LibTorch.
///
///     base::SerialQueue queue({.name = "cpu:1", .cpus = base::CpuSet::parse("1")});
///     base::Future<int> answer = queue.submit("answer", [] { return 42; });
///     int n = answer.get(base::Deadline(30s));       // what the function threw comes out here
namespace cohort::base {

namespace serial_queue_detail {

struct Shared;

// A function of one queue: who waits for it and who runs it share this.
class QueuedTask : public future_detail::Task {
 public:
  using Task::Task;
  bool wait(Deadline deadline) override;

 protected:
  std::string description() const override;
  const char* timeline_name() const override;
  bool on_begin() noexcept override;
  void on_abandoned() noexcept override;
  void on_done() noexcept override;

 private:
  friend struct Shared;

  std::shared_ptr<Shared> queue_;
};

}  // namespace serial_queue_detail

/// A thread, and the queue of functions that it runs one after another. Threads: any may submit().
class SerialQueue {
 public:
  /// How the thread starts, waits and idles.
  struct Options {
    std::string name = "worker";  ///< in the timeline and in messages
    CpuSet cpus = {};             ///< where it runs; empty: wherever its maker may
    /// How long it looks for more work before it sleeps, and a waiter for the result. A thread that shares
    /// its cores with another SerialQueue sleeps at once: it would look on the other's time.
    std::chrono::microseconds spin{50};
    /// Runs first on the thread; what it throws comes out of the constructor.
    std::function<void()> start = nullptr;
    /// Runs on the thread when it has had nothing to do for so long, again and again. What it throws is
    /// logged, and it runs no more.
    std::function<void()> idle = nullptr;
    /// How long the thread must have had nothing to do before `idle` runs.
    std::chrono::milliseconds idle_time = std::chrono::milliseconds(250);
    std::chrono::milliseconds start_time = std::chrono::minutes(1);  ///< that it may take
    bool in_timeline = true;  ///< whether the thread and its functions stand in the timeline
  };

  /// Throws: TimeoutError where the thread has not begun in time; it is left behind then, and ends after
  /// `start`.
  explicit SerialQueue(Options options);
  /// stop() with five seconds' patience; with none where the thread is late, so that it was waited for.
  ~SerialQueue();
  SerialQueue(const SerialQueue&) = delete;
  SerialQueue& operator=(const SerialQueue&) = delete;

  /// Has the thread run `fn` after all that it was given before; `what`, a literal, names it in the timeline
  /// and in messages. The function is destroyed on the thread before its result is there, and by stop() where
  /// the thread is left behind before it comes to it. Threads: any.
  template <typename Fn>
  auto submit(const char* what, Fn fn) {
    return future_detail::submit<serial_queue_detail::QueuedTask>(
        what, std::move(fn), [this](auto task) { post(std::move(task)); });
  }

  /// Options::name, as messages say it.
  const std::string& name() const;
  /// Whether the calling thread is this one.
  bool is_current() const;
  /// Whether another SerialQueue may run on one of its cores; of those that were given cores.
  bool shares_cores() const;
  /// How many functions the thread has not come to.
  int num_queued() const;
  /// Whether there is a function, begun or not, that it has not ended and that nobody waits for any more: a
  /// get() timed out, or it was abandoned.
  bool is_late() const;
  /// Whether nobody waits any more for the function that it runs: it was given up itself, or its Future is
  /// gone and another was given up after it. One that is late and not stuck has somebody who waits for what
  /// it runs now.
  bool is_stuck() const;
  /// Runs what was given, then ends. A thread that is still busy when `patience` is over is left behind: it
  /// ends after the function that it is in, and what waits after that fails. Returns whether it has ended.
  bool stop(std::chrono::milliseconds patience);

 private:
  void post(std::shared_ptr<serial_queue_detail::QueuedTask> task);

  std::shared_ptr<serial_queue_detail::Shared> shared_;
  std::thread thread_;
};

}  // namespace cohort::base

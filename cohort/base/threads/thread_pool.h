#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cohort/base/threads/task.h"

/// Functions that run several at a time, and begin in the order in which they were given. No LibTorch.
///
///     base::ThreadPool pool({.name = "rpc", .max_threads = 8});
///     base::Future<int> answer = pool.submit("answer", [] { return 42; });
///     int n = answer.get(base::Deadline(30s));       // what the function threw comes out here
namespace cohort::base {

namespace thread_pool_detail {

struct Shared;

// A function of one pool: who waits for it and who runs it share this.
class PooledTask : public future_detail::Task {
 public:
  using Task::Task;

 protected:
  std::string description() const override;
  bool on_begin() noexcept override;
  void on_abandoned() noexcept override;

 private:
  friend struct Shared;

  std::shared_ptr<Shared> pool_;
  bool is_stuck_ = false;  // it was abandoned while it ran; read once it is done
};

}  // namespace thread_pool_detail

/// Threads are made when they are needed, and stay, or end once they have been idle (Options::idle_time).
/// Threads: any.
class ThreadPool {
 public:
  /// How many threads there may be, and how each begins.
  struct Options {
    std::string name = "pool";  ///< of its threads, in the timeline and in messages
    /// Functions that run at the same time, at least 1. One that was abandoned while it runs, as after a
    /// get() that timed out, does not count: another thread takes its place.
    int max_threads = 1;
    std::function<void()> start = nullptr;  ///< runs first on each thread; must not throw
    /// Threads above `num_kept` that the pool could do without for so long end, within twice that time. Zero:
    /// they stay.
    std::chrono::milliseconds idle_time{0};
    std::size_t num_kept = 0;
  };

  /// Throws: UsageError for max_threads below 1.
  explicit ThreadPool(Options options);
  /// stop() with five seconds' patience, where it has not been stopped.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Has a thread run `fn`, which is destroyed there before its result is there. `what`, a literal or
  /// interned, names it in the timeline and in messages. One that was abandoned before it began does not run.
  /// Throws: UsageError where the pool has been stopped; SystemError where there are no more threads to be
  /// had.
  template <typename Fn>
  auto submit(const char* what, Fn fn) {
    return future_detail::submit<thread_pool_detail::PooledTask>(
        what, std::move(fn), [this](auto task) { post(std::move(task)); });
  }

  /// A function of a pool that waits for another one: while this lives, a further thread may run in its
  /// place, so that functions which wait for functions of the same pool cannot use it up. On another thread
  /// it does nothing.
  class Waiting {
   public:
    Waiting();
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    std::shared_ptr<thread_pool_detail::Shared> shared_;
  };

  /// Runs what was given, then ends the threads. Those that are still busy when `patience` is over are left
  /// behind: each ends after the function that it is in, and what has not begun fails. Returns how many are
  /// left; called again, it does not wait. On a thread of the pool it leaves all behind.
  int stop(std::chrono::milliseconds patience);

 private:
  void post(std::shared_ptr<thread_pool_detail::PooledTask> task);

  std::shared_ptr<thread_pool_detail::Shared> shared_;
};

}  // namespace cohort::base

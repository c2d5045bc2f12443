#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/base/placement.h"
#include "cohort/base/threads/serial_queue.h"

/// The thread of a placement: docs/guide/parallel.md, "Placements".
namespace cohort::parallel {

/// How long one function may take on a placement's thread before whoever waits for it gives up.
inline constexpr std::chrono::milliseconds kPlacementTimeout = std::chrono::minutes(10);

namespace placement_detail {

/// LibTorch's state of the calling thread, its core::RandomScope, and its stream on each GPU: see
/// placement_worker.cpp.
class CallerState {
 public:
  explicit CallerState(c10::Device device);
  ~CallerState();
  CallerState(CallerState&&) noexcept;
  CallerState& operator=(CallerState&&) = delete;

  /// That state on the thread where this lives, until it ends.
  class Scope {
   public:
    explicit Scope(const CallerState& state);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace placement_detail

/// A thread that runs on the cores of one placement, computes with as many threads as these are (one for a
/// GPU's), and does what it is given, in order.
///
///     const auto worker = parallel::PlacementWorker::of(base::Placement::parse("cpu:1"));
///     auto y = worker->submit("forward", [=] { return model->forward(x); });    // meanwhile, something else
///     use(y.get(base::Deadline(parallel::kPlacementTimeout)));
///
/// A function finds the gradient mode, inference mode, autocast state, core::RandomScope and streams of
/// whoever gave it, as they were then. A graph that it makes goes back on the thread that calls backward:
/// parallel/graph_boundary.h changes that. Threads: any.
class PlacementWorker : public std::enable_shared_from_this<PlacementWorker> {
 public:
  /// Returns the worker of this placement: one in a process for each name, for as long as anybody has it.
  /// Loads LibTorch's CUDA part where the placement needs it. Says once when two placements share a core.
  /// Throws: as core::device_of; SystemError where there are no more threads.
  static std::shared_ptr<PlacementWorker> of(const base::Placement& placement);

  /// The placement that it was asked for with.
  const base::Placement& placement() const { return placement_; }
  /// Where tensors of its parts are to be.
  c10::Device device() const { return device_; }
  /// How many threads one operator uses on it.
  int intra_op_threads() const { return intra_op_threads_; }
  /// Whether the calling thread is this one.
  bool is_current() const;

  /// How many functions the thread has not come to.
  int num_queued() const;

  /// Has the thread run `fn` after all that it was given before; `what`, a literal or interned, names it in
  /// the timeline and in messages. A thread that is still busy with a function whose deadline has passed is
  /// left behind: this starts a new one.
  template <typename Fn>
  base::Future<std::invoke_result_t<Fn&>> submit(const char* what, Fn fn) {
    auto function = [state = placement_detail::CallerState(device_), fn = std::move(fn)]() mutable {
      const placement_detail::CallerState::Scope scope(state);
      return fn();
    };
    const auto self = shared_from_this();  // the function may hold the last reference, and end at once
    const auto lock = replace_if_stuck();
    return thread_->submit(what, std::move(function));
  }
  /// Returns fn(), run on the thread; on that thread itself, a plain call.
  /// Throws: what fn threw; TimeoutError naming the placement.
  template <typename Fn>
  std::invoke_result_t<Fn&> run(const char* what, Fn fn,
                                base::Deadline deadline = base::Deadline(parallel::kPlacementTimeout)) {
    if (is_current()) return fn();
    return submit(what, std::move(fn)).get(deadline);
  }

 private:
  explicit PlacementWorker(const base::Placement& placement);
  std::shared_ptr<base::SerialQueue> start() const;
  std::unique_lock<std::mutex> replace_if_stuck();

  base::Placement placement_;
  c10::Device device_;
  int intra_op_threads_;
  mutable std::mutex mutex_;
  std::shared_ptr<base::SerialQueue> thread_;  // under mutex_
};

/// The threads of placements, which stay while it lives: for counting what each of them does.
class PlacementThreads {
 public:
  explicit PlacementThreads(const std::vector<base::Placement>& placements);
  const std::vector<std::thread::id>& ids() const { return ids_; }

 private:
  std::vector<std::shared_ptr<PlacementWorker>> workers_;
  std::vector<std::thread::id> ids_;
};

}  // namespace cohort::parallel

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "cohort/base/threads/deadline.h"

namespace cohort::data {

/// Threads that work through numbered jobs of many small items, in order of the jobs, a few items at a
/// time.
///
/// One caller publishes jobs and waits for them; up to `slots` jobs are under way at once. Workers share the
/// work by item: a ticket counter hands out chunks of consecutive items, so all workers finish a job
/// together and nobody waits for a slow item except the job that holds it.
/// Threads: one caller at a time; `work` runs on the workers, each item exactly once, and must not throw.
class WorkerPool {
 public:
  struct Options {
    int workers = 1;
    /// Jobs that may be under way at once.
    std::int64_t slots = 2;
    /// Most items of a job.
    std::int64_t items = 1;
    /// Items per ticket.
    std::int64_t chunk = 1;
  };
  using ItemFunction = std::function<void(int worker, std::int64_t job, std::int64_t item)>;
  using Start = std::function<void(int worker)>;

  /// `start`, if given, runs once on each worker first. Throws: SystemError where there are not that many
  /// threads to be had.
  WorkerPool(Options options, ItemFunction work, Start start = nullptr);
  /// stop() with five seconds' patience.
  ~WorkerPool();

  /// Hands out job `published()`, with items 0 .. num_items - 1. The job `slots` before it must be done.
  void publish(std::int64_t num_items);
  std::int64_t published() const;
  bool done(std::int64_t job) const;
  /// Returns whether `job` was done before the deadline.
  bool wait(std::int64_t job, base::Deadline deadline);
  /// Items of published jobs that no worker has begun are passed over; the jobs become done soon.
  void cancel();

  /// An item that a worker is busy with.
  struct Busy {
    int worker = 0;
    std::int64_t job = 0;
    std::int64_t item = 0;
    std::chrono::nanoseconds since{0};
  };
  /// The item that has kept a worker busy the longest.
  std::optional<Busy> longest() const;

  /// Ends the workers. Those that are still inside `work` when `patience` is over are left behind: they end
  /// when `work` returns. Returns how many were left.
  int stop(std::chrono::milliseconds patience);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace cohort::data

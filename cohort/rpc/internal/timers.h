#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "cohort/base/threads/deadline.h"

namespace cohort::rpc {

/// Calls functions at their time, on a thread of its own. A function that takes longer than 1 ms, as one of a
/// program may, continues there, and another thread calls those that come after it. Threads: any.
class Timers {
 public:
  using Time = base::Deadline::Clock::time_point;
  using Key = std::pair<Time, std::uint64_t>;

  /// Throws: std::system_error where no thread can be had.
  Timers();
  /// What has not been called is dropped.
  ~Timers();
  Timers(const Timers&) = delete;
  Timers& operator=(const Timers&) = delete;
  /// Ends the threads, once the functions that they run have returned: whose owner may then be destroyed.
  /// After five seconds those that still run are left behind. By such a function: it does not wait.
  void stop();

  /// Has `fn`, which must not throw, called then.
  Key add(Time time, std::function<void()> fn);
  /// It is called no more, but may be running.
  void remove(const Key& key);

 private:
  struct Shared;

  const std::shared_ptr<Shared> shared_;
};

}  // namespace cohort::rpc

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "cohort/base/threads/deadline.h"

namespace cohort::rpc {

/// Measures the function of a handler on this thread, without its answer: to send that may wake a thread
/// which takes the core.
class RunTimer {
 public:
  using Clock = base::Deadline::Clock;
  using Key = std::pair<std::string, std::uint64_t>;  // the caller's name, its number of the call

  explicit RunTimer(const Key& key) : key_(key), outer_(std::exchange(current(), this)) {}
  ~RunTimer() { current() = outer_; }
  RunTimer(const RunTimer&) = delete;
  RunTimer& operator=(const RunTimer&) = delete;

  /// The answer of a call begins. It may be that of another call than the one which runs here.
  static void end(const Key& key) {
    RunTimer* const timer = current();
    if (timer != nullptr && !timer->end_ && timer->key_ == key) timer->end_ = Clock::now();
  }
  Clock::duration elapsed() const { return end_.value_or(Clock::now()) - begin_; }

 private:
  static RunTimer*& current() {
    thread_local RunTimer* timer = nullptr;
    return timer;
  }

  const Key& key_;
  const Clock::time_point begin_ = Clock::now();
  std::optional<Clock::time_point> end_;
  RunTimer* const outer_;
};

}  // namespace cohort::rpc

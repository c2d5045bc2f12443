#pragma once

#include <algorithm>
#include <chrono>
#include <string_view>

#include "cohort/base/error.h"

/// A point in time by which something must have happened, handed down through every call that may wait.
///
/// A timeout that is passed on by value starts anew at each call; a deadline does not, so ten waits of one
/// operation together last no longer than the caller allowed.
///
///     void fetch(base::Deadline deadline) {
///       connect(deadline);                                  // both share the same 30 s
///       while (!arrived()) {
///         deadline.check("data.fetch", "an answer from the store");
///         wait_for(deadline.sooner(base::Deadline(100ms)).remaining());
///       }
///     }
namespace cohort::base {

/// A moment on the steady clock by which a wait must have ended, handed down through the calls that share
/// it.
class Deadline {
 public:
  /// The clock that all deadlines count by: setting the system's time does not move them.
  using Clock = std::chrono::steady_clock;

  /// A deadline `timeout` from now. A negative timeout has already passed; one too long for the clock never
  /// does.
  template <typename Rep, typename Period>
  explicit Deadline(std::chrono::duration<Rep, Period> timeout)
      : Deadline(Clock::now(), std::chrono::duration_cast<std::chrono::duration<double>>(timeout)) {}

  /// A deadline that never passes: for code that has said why it may wait for ever.
  static Deadline never() { return Deadline(Clock::now(), std::chrono::duration<double>(kForeverSeconds)); }

  /// Whether it is never().
  bool is_never() const { return end_ == Clock::time_point::max(); }
  /// Whether it has passed; one that is never() does not.
  bool expired() const { return !is_never() && Clock::now() >= end_; }

  /// Time left, never below zero; the largest duration when the deadline never passes.
  Clock::duration remaining() const {
    if (is_never()) return Clock::duration::max();
    return std::max(Clock::duration::zero(), end_ - Clock::now());
  }
  /// Time left in whole milliseconds, rounded up and at most INT_MAX: what poll() and its like take.
  int remaining_ms() const {
    using std::chrono::milliseconds;
    const auto left = remaining();
    if (left > milliseconds(2147483647)) return 2147483647;
    return static_cast<int>(std::chrono::ceil<milliseconds>(left).count());
  }
  /// Time since the deadline was made.
  Clock::duration elapsed() const { return Clock::now() - start_; }
  /// The moment itself; the clock's last one where it is never().
  Clock::time_point end() const { return end_; }

  /// The earlier of the two.
  Deadline sooner(Deadline other) const { return other.end_ < end_ ? other : *this; }

  /// One that much later; one that never passes stays so.
  Deadline later(Clock::duration time) const { return is_never() ? *this : Deadline(remaining() + time); }

  /// Throws TimeoutError naming `what` was waited for and how long, once the deadline has passed.
  void check(std::string_view where, std::string_view what, std::string_view hint = "") const {
    if (!expired()) return;
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(elapsed()).count();
    throw TimeoutError(where, concat("waited ", waited, " ms for ", what), hint);
  }

 private:
  static constexpr double kForeverSeconds = 1e9;  // 31 years: nearer to never than any clock runs

  Deadline(Clock::time_point start, std::chrono::duration<double> timeout)
      : start_(start),
        end_(timeout.count() >= kForeverSeconds
                 ? Clock::time_point::max()
                 : start + std::chrono::duration_cast<Clock::duration>(
                               std::max(timeout, std::chrono::duration<double>(-kForeverSeconds)))) {}

  Clock::time_point start_;
  Clock::time_point end_;
};

}  // namespace cohort::base

#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/arg.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// How long a call takes, measured so that the figure can be believed.
///
///     bench::Measurement figure =
///         bench::timeit([&] { return x.mul(y); }, bench::TimeitOptions().label("mul"));
///     std::string line = figure.to_text();
///     // mul: best 1.23 us, median 1.25 us, spread 2 %, 7 rounds of 20000 calls, 1 thread
namespace cohort::bench {

/// Returns the time since some fixed moment; it never goes back. Tests give one of their own.
using Clock = std::function<std::chrono::nanoseconds()>;

/// Returns a clock of the time that the threads of this process have computed, which other work on the
/// machine hardly moves. Waiting does not count, and the times of several threads add up.
Clock cpu_clock();

/// Units: min_time is the least time that one round lasts, by wall clock.
struct TimeitOptions {
  /// Names the measurement in tables.
  TORCH_ARG(std::string, label) = "";
  TORCH_ARG(std::chrono::nanoseconds, min_time) = std::chrono::milliseconds(20);
  /// How often the work is measured: figures of the result.
  TORCH_ARG(int, rounds) = 7;
  /// Calls in a round; 0: as many of 1, 2, 5, 10, 20 ... as min_time needs.
  TORCH_ARG(std::int64_t, calls) = 0;
  /// Calls before the first that counts: they make caches warm and memory there.
  TORCH_ARG(int, warm_up) = 1;
  /// Threads of one operator while it is measured; 0: as it is set now.
  TORCH_ARG(int, threads) = 0;
  /// Null: std::chrono::steady_clock.
  TORCH_ARG(Clock, clock) = nullptr;
};

/// What timeit() saw. Units: seconds per call.
struct Measurement {
  std::string label;            ///< TimeitOptions::label
  std::vector<double> seconds;  ///< one figure for each round, in the order of the rounds
  std::int64_t calls = 0;       ///< in each round
  int threads = 0;              ///< of one operator

  /// The fastest round: what the code takes when nothing disturbs it.
  double best() const { return percentile(0); }
  /// Half of the rounds took no longer.
  double median() const { return percentile(0.5); }
  /// Returns the time that the share `part` (0 to 1) of the rounds does not exceed.
  double percentile(double part) const;
  /// The distance between the quartiles over the median: 0.02 says that half of the rounds lie within 2 %.
  double spread() const;
  /// One line, as above. A spread of 10 % and more says so: such a figure wants a quieter machine.
  std::string to_text() const;
};

std::ostream& operator<<(std::ostream& out, const Measurement& measurement);

/// Returns seconds with the unit that suits them and four digits: "12.34 us", "1.234 ms".
std::string to_text(double seconds);

/// Makes the compiler compute `value` although nobody reads it.
template <typename T>
void keep(const T& value) {
  asm volatile("" : : "g"(&value) : "memory");
}

/// Returns the value that the share `part` (0 to 1) of `values` does not exceed, between two of them by
/// proportion; 0 where there are none.
double percentile(std::vector<double> values, double part);

/// Returns the seconds that `work()` took by wall clock, accelerators in use waited for.
double seconds_of(c10::function_ref<void()> work);

/// The same for a loop of one's own: `loop(n)` must do the work n times. What timeit() calls.
Measurement measure(c10::function_ref<void(std::int64_t)> loop, const TimeitOptions& options);

/// The same for work that is timed where it runs (in another process, with something before each call that is
/// not to count): each call of `round` is a round, and returns its seconds per call. Of the options it takes
/// label, rounds, warm_up and threads; `calls` is what the Measurement says that a round had.
/// Ranks: as many rounds on each, so those whose work is collective measure side by side.
Measurement sample(c10::function_ref<double()> round, const TimeitOptions& options);

/// Measures `fn()`, called in a loop without any call in between that the compiler cannot see through.
/// First `warm_up` calls that do not count, then the number of calls in a round is found, then the rounds are
/// timed; at the end of each round accelerators in use are waited for.
/// Threads: one caller at a time where `threads` is set, as that is the process's.
/// Throws: UsageError for rounds, calls, warm_up or min_time below their least, or more threads than cores;
/// whatever `fn` throws.
template <typename Fn>
Measurement timeit(Fn&& fn, const TimeitOptions& options = {}) {
  return measure(
      [&fn](std::int64_t calls) {
        for (std::int64_t call = 0; call < calls; ++call) {
          if constexpr (std::is_void_v<std::invoke_result_t<Fn&>>) {
            fn();
          } else {
            keep(fn());
          }
        }
      },
      options);
}

namespace detail {

/// One round after the other, for several measured in turns. What it is given must outlive it.
class Rounds {
 public:
  Rounds(c10::function_ref<void(std::int64_t)> loop, const TimeitOptions& options);
  Rounds(c10::function_ref<double()> round, const TimeitOptions& options);
  void run() { measurement_.seconds.push_back(round_()); }
  Measurement result() && { return std::move(measurement_); }

 private:
  explicit Rounds(const TimeitOptions& options);

  std::function<double()> round_;
  Measurement measurement_;
};

/// Sets the threads of an operator for a scope; 0 leaves them.
class ThreadsGuard {
 public:
  explicit ThreadsGuard(int threads);
  ~ThreadsGuard();
  ThreadsGuard(const ThreadsGuard&) = delete;
  ThreadsGuard& operator=(const ThreadsGuard&) = delete;

 private:
  int before_;
};

}  // namespace detail

}  // namespace cohort::bench

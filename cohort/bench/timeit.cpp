// The number of calls in a round grows by at most ten times a try, until a round lasts long enough. It is
// rounded up to 1, 2 or 5 times a power of ten, and then fixed, so all rounds are alike. Accelerators are
// waited for at the end of each round, within its time.
#include "cohort/bench/timeit.h"

#include <ATen/Parallel.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <ostream>

#include "cohort/base/error.h"
#include "cohort/bench/internal/accelerator.h"
#include "cohort/core/device.h"

namespace cohort::bench {
namespace {

constexpr std::int64_t kMaxCalls = 1'000'000'000;

void check(const TimeitOptions& options) {
  if (options.rounds() < 1 || options.calls() < 0 || options.warm_up() < 0 ||
      options.min_time().count() < 1) {
    throw UsageError("bench.timeit",
                     base::concat("got rounds ", options.rounds(), ", calls ", options.calls(), ", warm_up ",
                                  options.warm_up(), ", min_time ", options.min_time().count(),
                                  " ns; expected rounds of 1 or more, calls of 0 (chosen) or more, a warm_up "
                                  "of 0 or more, a min_time above 0"));
  }
}

/// The least of 1, 2, 5, 10, 20, 50 ... that is not below `number`.
std::int64_t round_up(double number) {
  for (std::int64_t power = 1; power < kMaxCalls; power *= 10) {
    for (const std::int64_t digit : {1, 2, 5}) {
      if (static_cast<double>(digit * power) >= number) return digit * power;
    }
  }
  return kMaxCalls;
}

}  // namespace

Clock cpu_clock() {
  return [] {
    timespec now{};
    // Of all threads together: two that are busy make two seconds in one.
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
  };
}

double percentile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  // Linear between the two nearest values, as numpy.percentile() does it.
  const double place = part * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (place - static_cast<double>(below)) * (values[above] - values[below]);
}

double Measurement::percentile(double part) const {
  return bench::percentile(seconds, part);
}

double Measurement::spread() const {
  // The middle half of the rounds over their median: a single disturbance does not move it.
  return median() > 0 ? (percentile(0.75) - percentile(0.25)) / median() : 0;
}

std::string Measurement::to_text() const {
  const double percent = 100 * spread();
  return base::concat(label, label.empty() ? "" : ": ", "best ", bench::to_text(best()), ", median ",
                      bench::to_text(median()), ", spread ", std::lround(percent), " %",
                      percent >= 10 ? " (the machine was not quiet)" : "", ", ", seconds.size(),
                      seconds.size() == 1 ? " round of " : " rounds of ", calls,
                      calls == 1 ? " call, " : " calls, ", threads, threads == 1 ? " thread" : " threads");
}

std::ostream& operator<<(std::ostream& out, const Measurement& measurement) {
  return out << measurement.to_text();
}

std::string to_text(double seconds) {
  struct Unit {
    double size;
    const char* name;
  };
  constexpr std::array<Unit, 4> kUnits = {{{1, "s"}, {1e-3, "ms"}, {1e-6, "us"}, {1e-9, "ns"}}};
  Unit unit = kUnits.back();
  for (const Unit& candidate : kUnits) {
    // Not 0.99996 s, which would be printed as 1000 ms.
    if (std::abs(seconds) >= 0.99995 * candidate.size) {
      unit = candidate;
      break;
    }
  }
  const double number = seconds / unit.size;
  // Four digits that count, whatever the unit.
  const int digits = std::abs(number) < 9.9995   ? 3
                     : std::abs(number) < 99.995 ? 2
                     : std::abs(number) < 999.95 ? 1
                                                 : 0;
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%.*f %s", digits, number, unit.name);
  return text.data();
}

double seconds_of(c10::function_ref<void()> work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  detail::wait_for_accelerator();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Measurement measure(c10::function_ref<void(std::int64_t)> loop, const TimeitOptions& options) {
  const detail::ThreadsGuard threads(options.threads());
  detail::Rounds rounds(loop, options);
  for (int round = 0; round < options.rounds(); ++round) rounds.run();
  return std::move(rounds).result();
}

Measurement sample(c10::function_ref<double()> round, const TimeitOptions& options) {
  const detail::ThreadsGuard threads(options.threads());
  detail::Rounds rounds(round, options);
  for (int i = 0; i < options.rounds(); ++i) rounds.run();
  return std::move(rounds).result();
}

namespace detail {

Rounds::Rounds(const TimeitOptions& options) {
  check(options);
  measurement_.label = options.label();
  // After a ThreadsGuard, so it is the number that the rounds run with.
  measurement_.threads = at::get_num_threads();
  measurement_.calls = std::max<std::int64_t>(options.calls(), 1);
}

Rounds::Rounds(c10::function_ref<double()> round, const TimeitOptions& options) : Rounds(options) {
  for (int i = 0; i < options.warm_up(); ++i) round();
  round_ = round;
}

Rounds::Rounds(c10::function_ref<void(std::int64_t)> loop, const TimeitOptions& options) : Rounds(options) {
  Clock clock = options.clock();
  if (!clock) {
    clock = [] {
      return std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::chrono::steady_clock::now().time_since_epoch());
    };
  }
  const auto time = [loop, clock](std::int64_t calls) {
    const std::chrono::nanoseconds begin = clock();
    loop(calls);
    wait_for_accelerator();
    return std::chrono::duration<double>(clock() - begin).count() / static_cast<double>(calls);
  };
  // The wait is below, so that its work does not run into the first round.
  if (options.warm_up() > 0) loop(options.warm_up());
  wait_for_accelerator();
  const double least = std::chrono::duration<double>(options.min_time()).count();
  std::int64_t calls = measurement_.calls;
  while (options.calls() == 0 && calls < kMaxCalls) {
    const double took = time(calls) * static_cast<double>(calls);
    if (took >= least) break;
    // Ten times at most: a first guess from a few nanoseconds is worth little.
    const double wanted = static_cast<double>(calls) * (took > 0 ? std::min(least / took, 10.0) : 10.0);
    // At least the next step of 1, 2, 5, or the loop would not end.
    calls = std::max(round_up(wanted), round_up(static_cast<double>(calls) + 1));
  }
  measurement_.calls = calls;
  round_ = [time, calls] { return time(calls); };
}

ThreadsGuard::ThreadsGuard(int threads) : before_(threads > 0 ? at::get_num_threads() : 0) {
  if (threads < 0) {
    throw UsageError("bench.timeit",
                     base::concat("got ", threads, " threads, expected 0 (as it is) or more"));
  }
  if (threads > 0) core::set_intra_op_threads(threads);
}

ThreadsGuard::~ThreadsGuard() {
  if (before_ > 0) at::set_num_threads(before_);
}

}  // namespace detail

}  // namespace cohort::bench

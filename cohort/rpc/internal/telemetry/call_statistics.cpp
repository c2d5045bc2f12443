// Times are counted in buckets, eight for each power of two. So a time is known to an eighth, from a
// nanosecond to centuries, in a kilobyte. Old calls are forgotten by halves: once the newest half has 1,024
// calls it takes the place of the half before it. A list of the last times would be exact, but each reader
// would have to sort it.
#include "cohort/rpc/internal/telemetry/call_statistics.h"

#include <bit>
#include <cmath>

namespace cohort::rpc {
namespace {

using std::chrono::nanoseconds;

std::size_t bucket_of(nanoseconds time) {
  const auto value = static_cast<std::uint64_t>(std::max<std::int64_t>(time.count(), 0));
  if (value < 8) return value;
  const int log = std::bit_width(value) - 1;
  return static_cast<std::size_t>(log - 2) * 8 + ((value >> (log - 3)) & 7);
}

// The longest time of a bucket.
nanoseconds end_of_bucket(std::size_t bucket) {
  if (bucket < 8) return nanoseconds(bucket);
  const std::uint64_t width = std::uint64_t{1} << (bucket / 8 - 1);
  return nanoseconds(static_cast<std::int64_t>((8 + bucket % 8) * width + (width - 1)));
}

}  // namespace

std::int64_t Rate::second_of(Time now) const {
  return std::max<std::int64_t>(std::chrono::floor<std::chrono::seconds>(now - begin_).count(), 0);
}

void Rate::add(Time now) {
  const std::int64_t second = second_of(now);
  Slot& slot = slots_[static_cast<std::size_t>(second % kSeconds)];
  if (slot.second != second) slot = {second, 0};
  ++slot.count;
}

double Rate::per_second(Time now) const {
  const std::int64_t second = second_of(now);
  std::uint64_t count = 0;
  for (const Slot& slot : slots_) {
    if (slot.second > second - kSeconds) count += slot.count;
  }
  // The newest second is not over, so the slots span nine to ten seconds.
  const std::int64_t first = std::max<std::int64_t>(second - kSeconds + 1, 0);
  const double time = std::chrono::duration<double>(now - begin_).count() - static_cast<double>(first);
  return static_cast<double>(count) / std::max(time, 1.0);
}

void LatencyHistogram::add(nanoseconds time) {
  if (newest_.num_calls == kCalls) {
    before_ = newest_;
    newest_ = {};
  }
  ++newest_.counts[bucket_of(time)];
  ++newest_.num_calls;
  newest_.max = std::max(newest_.max, time);
}

nanoseconds LatencyHistogram::quantile(double share) const {
  const std::uint32_t num_calls = newest_.num_calls + before_.num_calls;
  const auto enough = static_cast<std::uint32_t>(std::ceil(share * num_calls));
  std::uint32_t seen = 0;
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
    seen += newest_.counts[bucket] + before_.counts[bucket];
    if (seen > 0 && seen >= enough) return std::min(end_of_bucket(bucket), max());
  }
  return nanoseconds(0);
}

CallStatistics::Function& CallStatistics::count_made(const char* function, Time now) {
  count_made(now);
  const auto found = functions_.find(function);
  return found != functions_.end() ? found->second : functions_[function];
}

void CallStatistics::count_made(Time now) {
  ++num_made_;
  rate_made_.add(now);
}

void CallStatistics::count_end(Function& function, nanoseconds time, bool is_error) {
  ++function.num_calls;
  if (is_error) ++function.num_errors;
  function.latency.add(time);
}

void CallStatistics::count_handled(Time now) {
  ++num_handled_;
  rate_handled_.add(now);
}

void CallStatistics::write_to(AgentMetrics& metrics, Time now) const {
  metrics.calls_made = num_made_;
  metrics.calls_handled = num_handled_;
  metrics.calls_made_per_second = rate_made_.per_second(now);
  metrics.calls_handled_per_second = rate_handled_.per_second(now);
  for (const auto& [name, function] : functions_) {
    if (function.num_calls == 0) continue;
    metrics.functions.push_back({name, function.num_calls, function.num_errors,
                                 function.latency.quantile(0.5), function.latency.quantile(0.99),
                                 function.latency.max()});
  }
}

}  // namespace cohort::rpc

#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "cohort/rpc/agent_types.h"

/// What an agent counts of its calls. A call takes no memory, but for the first one of each function.
/// Threads: one at a time.
namespace cohort::rpc {

/// Events a second.
class Rate {
 public:
  using Time = std::chrono::steady_clock::time_point;
  explicit Rate(Time begin) : begin_(begin) {}
  void add(Time now);
  /// Over the last nine to ten seconds, or since the beginning, but at least over a second.
  double per_second(Time now) const;

 private:
  static constexpr std::int64_t kSeconds = 10;
  struct Slot {
    std::int64_t second = -kSeconds;
    std::uint64_t count = 0;
  };
  std::int64_t second_of(Time now) const;

  Time begin_;
  std::array<Slot, kSeconds> slots_;
};

/// How long the last 1,024 calls took, or up to twice as many.
class LatencyHistogram {
 public:
  void add(std::chrono::nanoseconds time);
  /// The time that this share of the calls did not exceed, or up to an eighth more; 0 where there is none.
  std::chrono::nanoseconds quantile(double share) const;
  /// The longest of them.
  std::chrono::nanoseconds max() const { return std::max(newest_.max, before_.max); }

 private:
  static constexpr std::uint32_t kCalls = 1024;
  static constexpr std::size_t kBuckets = 488;  // up to the largest number of nanoseconds
  struct Window {
    std::array<std::uint16_t, kBuckets> counts{};
    std::uint32_t num_calls = 0;
    std::chrono::nanoseconds max{0};
  };
  Window newest_, before_;
};

/// The calls of an agent.
class CallStatistics {
 public:
  using Time = Rate::Time;
  /// The calls of one function that have ended.
  struct Function {
    std::uint64_t num_calls = 0, num_errors = 0;
    LatencyHistogram latency;
  };

  explicit CallStatistics(Time now) : rate_made_(now), rate_handled_(now) {}
  /// A call begins. The function lives as long as this object.
  Function& count_made(const char* function, Time now);
  /// A call begins that has no answer.
  void count_made(Time now);
  void count_end(Function& function, std::chrono::nanoseconds time, bool is_error);
  /// A call of another worker has come.
  void count_handled(Time now);
  /// Sets what is said here of an agent.
  void write_to(AgentMetrics& metrics, Time now) const;

 private:
  std::uint64_t num_made_ = 0, num_handled_ = 0;
  Rate rate_made_, rate_handled_;
  std::map<std::string, Function, std::less<>> functions_;
};

}  // namespace cohort::rpc

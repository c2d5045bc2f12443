#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/base/timeline.h"

/// Calls in the timeline. A call is a span of its caller, and its handler a span of the worker that was
/// called. An arrow leads from the call to the handler, and to each handler that goes backward through the
/// same call. While the timeline is stopped each of these costs a relaxed load or two.
namespace cohort::rpc {

/// The calls that a worker made, from their begin to their end. Calls that are under way at the same time
/// stand on rows of their own: "calls of w0", "calls of w0 (2)". Threads: any.
class CallTrace {
 public:
  using Time = base::Timeline::Clock::time_point;
  explicit CallTrace(std::string worker) : worker_(std::move(worker)) {}
  /// Records a call that has ended.
  void add(std::string_view function, std::string_view callee, std::uint64_t call, Time begun);

 private:
  struct Row {
    int track = 0;
    Time end;  // of its last span
  };
  const std::string worker_;
  std::mutex mutex_;
  std::vector<Row> rows_;
};

/// Numbers of a worker that change over time, each a row: "pending calls of w0". Threads: any.
class CounterTrace {
 public:
  using Time = base::Timeline::Clock::time_point;
  struct Values {
    std::size_t pending_calls = 0, references = 0;
    std::uint64_t bytes_on_the_way = 0;
  };
  explicit CounterTrace(std::string worker) : worker_(std::move(worker)) {}
  /// Whether the caller is to record values: while the timeline records, once in 100 ms.
  bool is_due();
  void record(const Values& values) const;

 private:
  const std::string worker_;
  std::atomic<Time::rep> last_{0};  // 0: never
};

/// A call that has no answer, on this thread while it lives.
class MakeTrace {
 public:
  MakeTrace(std::string_view function, std::string_view caller, std::string_view callee, std::uint64_t call);

 private:
  const base::TimelineScope scope_;
};

/// A handler, on this thread while it lives.
class HandlerTrace {
 public:
  /// `is_recorded`: gradients may come for the call.
  HandlerTrace(std::string_view function, std::string_view caller, std::uint64_t call, bool is_recorded);

 private:
  const base::TimelineScope scope_;
};

/// The span of this thread goes backward through a call. `is_last`: no further backward can.
void trace_gradient(std::string_view caller, std::uint64_t call, bool is_last);

}  // namespace cohort::rpc

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/bench/operator_row.h"

/// Internal: what profile.h makes of LibTorch's events. Times in nanoseconds since 1970, as LibTorch has
/// them.
namespace cohort::bench::detail {

/// A call of an operator on a thread, or work on a GPU.
struct Event {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t row = 0;  ///< the system's number of the thread; on a GPU the stream
  int gpu = -1;          ///< -1: on a thread
  std::string name;
  std::string shapes = "";
  std::uint64_t id = 0;  ///< of a call; 0: none
  /// Of work on a GPU: the `id` of the innermost call that started it; 0: none.
  std::uint64_t started_by = 0;
};

/// Sorts: threads before GPUs, each by row and begin, what contains another first.
void sort(std::vector<Event>& events);

/// Returns what Profile::operators() has. `events` are sorted.
std::vector<OperatorRow> rows_of(const std::vector<Event>& events);

/// Returns what Profile::table() has.
std::string table_of(const std::vector<OperatorRow>& rows, std::int64_t steps, std::chrono::nanoseconds wall,
                     std::size_t max_rows);

/// Returns events of a Chrome trace in microseconds since `zero`, a comma before each: a row for the calls of
/// each thread, below the timeline's row of that thread and named like it, then one for each stream of a GPU.
/// `events` are sorted.
std::string trace_of(const std::vector<Event>& events, std::int64_t zero);

}  // namespace cohort::bench::detail

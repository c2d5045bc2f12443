#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace cohort::bench {

/// All calls of one operator. Units: of all recorded steps together.
struct OperatorRow {
  std::string name;        ///< "aten::addmm"; a node of backward has LibTorch's name for it
  std::string shapes;      ///< "[[16, 64], [64]]"; empty unless asked for
  std::int64_t calls = 0;  ///< how often it was called, in all threads
  std::chrono::nanoseconds total{
      0};  ///< with the operators that it called, counted once where it calls itself
  std::chrono::nanoseconds self{0};  ///< without them
  /// Of work on GPUs that it started itself, not by what it called. Work that no operator started has a row
  /// of its own, without calls.
  std::chrono::nanoseconds gpu{0};
};

}  // namespace cohort::bench

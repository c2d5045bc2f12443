#pragma once

#include <chrono>

namespace cohort::launch {

inline constexpr int kMaxLocalRanks = 4096;  ///< ranks of one node
inline constexpr int kMaxNodes = 100'000;    ///< nodes of one job

/// For programs to begin, and for processes to end that were killed: for all that begin or end together.
inline constexpr std::chrono::seconds kStartTime(30), kEndTime(10);

}  // namespace cohort::launch

#pragma once

#include <chrono>
#include <cstdint>

#include "cohort/membership/rank_link.h"

namespace cohort::launch {

/// Between two looks of an agent that runs. After a longer one it was stopped, and its ranks may have been
/// stopped with it.
inline constexpr std::chrono::seconds kLongestPause(1);

/// What an agent knows of the rank in one of its places. Not for users of the library.
struct ObservedRank {
  membership::RankStatus status = {};
  int pid = 0;                 ///< 0: it has ended
  std::uint64_t told = 0;      ///< number of its newest order
  std::uint64_t to_enter = 0;  ///< generation that it is to be in; 0: none
  int process = 0;             ///< its number there

  bool is_behind() const { return to_enter != 0 && status.entered < to_enter; }
};

}  // namespace cohort::launch

#pragma once

#include <cstdint>

#include "cohort/membership/rank_link.h"

namespace cohort::launch {

/// What an agent knows of the rank in one of its places. Not for users of the library.
struct SeenRank {
  membership::RankStatus status = {};
  int pid = 0;  ///< 0: it has ended
  std::uint64_t told =
      0;  ///< the newest generation in which its place has a number, and of which it was told
  std::uint64_t to_enter = 0;  ///< generation that it is to be in; 0: none
  int process = 0;             ///< its number there
};

}  // namespace cohort::launch

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cohort/membership/rank_link.h"
#include "cohort/membership/status.h"

namespace cohort::launch {

/// A rank of the generation has ended before the run has.
struct RankLoss {
  std::uint64_t generation = 0;  ///< of which this node was a member
  std::string text;
  int exit_status = 1;
  bool ends_run = false;  ///< its place has failed too often
};

/// What an agent says of itself, from what its ranks say. A loss is that of the newest generation: until the
/// next one comes, ranks count as in it, also those that start in the place of one that has ended. Not for
/// users of the library.
membership::MemberStatus fold_ranks(const membership::MemberStatus& before,
                                    const std::vector<membership::RankStatus>& ranks,
                                    const std::optional<RankLoss>& loss);

}  // namespace cohort::launch

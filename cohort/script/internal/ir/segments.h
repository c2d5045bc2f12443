#pragma once

#include <cstdint>
#include <vector>

#include "cohort/script/internal/ir/tape.h"

namespace cohort::script {

struct Trace;

/// A part of a recorded backward, after which some gradients are final.
struct Segment {
  std::size_t end = 0;                 ///< the first of the tape's calls that is no longer its own
  std::vector<std::size_t> gradients;  ///< in Trace::gradients, in the order in which they became final
};

/// Cuts the backward of `recorded` wherever gradients of `bytes` have become final since the last cut, so
/// that they can be handed on while the rest runs; 0: nowhere. A gradient is final after the last call that
/// uses its memory or its leaf's, so what gets it may keep it, change it, and step the leaf. Each gradient is
/// in one segment, the undefined ones in the first. `leaves`: slots of what the gradients belong to.
std::vector<Segment> cut_backward(const Trace& trace, const std::vector<int>& leaves, std::int64_t bytes);

}  // namespace cohort::script

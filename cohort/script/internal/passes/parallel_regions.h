#pragma once

#include <span>
#include <vector>

#include "cohort/script/internal/ir/tape.h"

namespace cohort::script {

struct PlannedStep;

/// Steps [begin, end) that another thread runs, while the caller continues at `end` and waits for it before
/// step `join`: a forked part, and what follows it as far as neither touches what the other writes to.
struct ParallelRegion {
  std::size_t begin = 0, end = 0, join = 0;
  bool operator==(const ParallelRegion&) const = default;
};

/// Returns the regions of a part whose steps are in the tape's order, in order.
std::vector<ParallelRegion> find_regions(const Tape& tape, std::span<const PlannedStep> steps);

/// Steps [begin, end) of which some run at the same time, and none with what is outside.
struct Concurrent {
  std::size_t begin = 0, end = 0;
  /// Whether `step` is one of them.
  bool holds(std::size_t step) const { return begin <= step && step < end; }
};
/// Returns the stretches that regions which overlap make together, in order.
std::vector<Concurrent> concurrent_steps(std::span<const ParallelRegion> regions);

/// Has values that two threads use released after the last of both: by the first step of which there is one
/// thread again, or, where there is none, at the end, by what is returned.
std::vector<int> defer_release(const Tape& tape, std::span<const ParallelRegion> regions,
                               std::span<PlannedStep> steps);

}  // namespace cohort::script

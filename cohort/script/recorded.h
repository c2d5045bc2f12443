#pragma once

#include <vector>

#include "cohort/script/segments.h"
#include "cohort/script/tape.h"

namespace cohort::script {

/// A recording and what its caller knows about it. Slots are the tape's.
struct Recorded {
  Tape tape;
  std::vector<int> inputs;
  std::vector<int> outputs;
  std::size_t split = 0;  ///< how many calls belong to forward; the rest is backward
  bool has_backward = false;
  std::vector<int> tangents;  ///< gradients of the outputs that backward starts from; kUndefined: no gradient
  std::vector<int> gradients;        ///< what backward returns; kUndefined: no gradient
  std::vector<bool> needs_gradient;  ///< which outputs do
  Tensors leaves;  ///< captured tensors that backward returns a gradient of, after the inputs'
  std::vector<std::vector<bool>> reached_from;  ///< of each gradient: by which tangents
  std::vector<Segment> segments;                ///< of backward; at least one where there is a backward
};

}  // namespace cohort::script

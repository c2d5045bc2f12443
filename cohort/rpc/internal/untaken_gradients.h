#pragma once

#include <cstdint>
#include <string>

#include "cohort/rpc/codec.h"

namespace cohort::rpc {

/// Tensors of objects whose gradients no late call has taken in a backward: Note [Late calls]. Each answer to
/// a call of kBackwardPart says how many are added, so the root knows of all once it has all answers.
struct UntakenGradients {
  std::int64_t count = 0;  ///< below 0: of those that another answer adds
  /// One that is gone, and that made objects or had them made; empty: none is known.
  std::string lost_worker = {};
};
COHORT_NESTED(UntakenGradients, count, lost_worker)

}  // namespace cohort::rpc

#pragma once

#include <cstdint>

#include "cohort/parallel/comm_hook.h"

namespace cohort::parallel {

/// How PowerSGD compresses gradients.
struct PowerSgdOptions {
  /// Columns of the two factors that travel in place of a matrix.
  std::int64_t matrix_approximation_rank = 1;
  /// Steps that are reduced in full before: gradients change most at the start.
  std::int64_t start_iter = 1000;
  /// A gradient travels in full if its factors are not that many times smaller.
  double min_compression_rate = 2;
  /// What a step could not send is added to the next one's gradient. Costs the gradients' memory again.
  bool use_error_feedback = true;
  /// Begins with the factor of the step before; off: with random numbers, the same on all ranks.
  bool warm_start = true;
};

/// Sends each gradient of two or more dimensions, as a matrix [n, m], as two factors [n, r] and [m, r]: one
/// step of a power iteration towards its best approximation of rank r. Others travel in full. Shapes:
/// dimension 0 by all others. State, kept by parameter: a factor and, with error feedback, what was not sent;
/// it is this rank's own, and no checkpoint holds it. Threads: as Reducer. One hook for one Reducer. Throws:
/// UsageError for a rank or a rate below 1. Source: Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019,
/// algorithms 1 and 2; error feedback from this rank's own factor, so that what all ranks keep back adds up
/// to what was not applied.
CommHook power_sgd_hook(const PowerSgdOptions& options = {});

}  // namespace cohort::parallel

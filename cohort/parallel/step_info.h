#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "cohort/comm/group.h"

/// What ranks tell each other of a step before gradients are averaged.
namespace cohort::parallel {

/// What this rank says of its part of a step.
struct StepInfo {
  double weight = 1;   ///< samples that its mean loss was taken over, may be 0
  bool finite = true;  ///< false: no rank reduces anything, and the report says which rank said so
};

/// Says what all ranks learnt of a step, equal on all of them.
struct AverageReport {
  double weight = 0;            ///< sum over ranks
  std::optional<int> bad_rank;  ///< first rank whose loss was not finite: gradients were left as they are
  std::optional<std::int64_t> bad_virtual_rank;  ///< the same, where there are virtual ranks
  std::int64_t bytes = 0;                        ///< gradients that were reduced
  /// Whether gradients were reduced.
  bool ok() const { return !bad_rank.has_value(); }
};

/// Throws: UsageError for a weight that is negative or not finite.
void check_weight(const StepInfo& info);

/// Returns this rank's words of a message whose sum over ranks all can read: its StepInfo, and after it
/// `more` zeros for the caller's own. On the CPU, float64.
/// Throws: as check_weight().
at::Tensor make_step_header(const comm::Group& group, const StepInfo& info, std::int64_t more = 0);
/// Reads the sum: everything but AverageReport::bytes.
AverageReport read_step_header(const at::Tensor& header, int num_ranks);

}  // namespace cohort::parallel

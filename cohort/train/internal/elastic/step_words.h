#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cohort/train/internal/fit/rank_coordinator.h"

/// What processes of an elastic run tell each other of a step, within its transaction. Internal to this
/// module.
namespace cohort::train {

struct StepWords {
  RankCoordinator::MetricSums sums;                           ///< of the step's metrics
  std::map<std::int64_t, std::vector<std::int64_t>> samples;  ///< indices in the data set, by virtual rank
  RankCoordinator::ControlRequests requests;                  ///< made before the step
  std::int64_t num_listed = 0;  ///< steps whose lines are on disk in the ledger, as the first process knows
  bool is_opened = false;       ///< likewise: the files of the run are open for what this start writes

  std::string to_text() const;
  /// Returns what all processes together say. Throws: CommError for a text that to_text() did not write.
  static StepWords of_all(const std::vector<std::string>& texts);
};

}  // namespace cohort::train

#pragma once

#include <cstdint>

#include "cohort/config/types.h"

namespace cohort::train {

/// How many samples of a step go where. The one place that computes it from a configuration. With virtual
/// ranks (distributed.virtual_ranks) what is said of a rank is true of a virtual rank.
struct BatchPlan {
  std::int64_t global = 0;        ///< samples of a step over all ranks
  std::int64_t step = 0;          ///< of a step on one rank: the largest share
  std::int64_t part = 0;          ///< of one forward and backward; a step accumulates step / part of them
  std::int64_t micro_batch = 0;   ///< of one forward: a part, or what a pipeline cuts it into
  std::int64_t loaded = 0;        ///< that the loader hands out at once: a part, or the whole step
  std::int64_t evaluation = 0;    ///< of a batch of validation data on one rank
  std::int64_t loader_parts = 1;  ///< that the loader cuts a step into
  std::int64_t task_parts = 1;    ///< that the task cuts what it gets into

  /// Returns the samples of the largest of so many replicas, among which data_parallel divides a part.
  std::int64_t replica(std::int64_t num_replicas) const;
  /// Returns the plan of the same step where the loader hands it out whole, and the task cuts it.
  BatchPlan with_whole_steps() const;
};

/// Returns value / by, rounded up.
constexpr std::int64_t divided_up(std::int64_t value, std::int64_t by) {
  return (value + by - 1) / by;
}

/// Returns the samples of the largest micro-batch where `samples` are cut into `num_micro_batches`, which is
/// at least 1.
std::int64_t largest_micro_batch(std::int64_t samples, std::int64_t num_micro_batches);

/// Returns the shares of a step: distributed.virtual_ranks, or where it is 0 the ranks.
std::int64_t num_shares(const config::DistributedConfig& distributed, std::int64_t num_ranks);

/// Returns the samples of a step over all ranks.
std::int64_t global_batch_size(const config::TrainConfig& train, std::int64_t num_ranks);

/// Returns the samples of a step that optim.lr is for: optim.lr_base_size, or where it is 0 the samples of
/// one rank's step. So optim.lr means the same on one rank and on many.
std::int64_t lr_base_size(const config::OptimConfig& optim, const config::TrainConfig& train);

/// Returns the samples of a batch of validation data over all ranks.
std::int64_t global_evaluation_size(const config::TrainConfig& train, std::int64_t num_ranks);

/// Returns the plan of a step on `num_ranks` ranks. The loader hands out parts one after the other.
/// Where broken samples are skipped it hands out the whole step, because their number weighs each part.
/// Throws: UsageError for an unknown distributed.model, and for sizes or a number of ranks below 1;
/// ConfigError for an unknown data.on_error.
BatchPlan batch_plan(const config::TrainConfig& train, const config::DistributedConfig& distributed,
                     const config::DataConfig& data, int num_ranks);

}  // namespace cohort::train

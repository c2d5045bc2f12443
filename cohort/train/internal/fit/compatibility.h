#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "cohort/data/loader.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/train/internal/fit/run_state.h"
#include "cohort/train/task.h"
#include "cohort/train/trainer_options.h"

/// What must fit together before a run begins or resumes. Internal to this module.
namespace cohort::train {

/// Throws: UsageError unless `loader` (the "training" or the "evaluation" one) deals for this process.
void check_share(const parallel::GradientSync& gradient_sync, const data::Loader& loader, const char* which);

/// Throws: UsageError where an epoch of `loader` (the "training" or the "evaluation" one) has no batch.
void check_has_batch(const data::Loader& loader, const char* which);

/// Logs a warning where a rank computes a single sample of a batch, or of a part of one, and the model has
/// batch norm. `max_steps`: of the run; 0: no limit.
void warn_of_single_sample(const Task& task, const data::Loader& train, std::int64_t max_steps);

/// An option of TrainerOptions, as ranks that train together compare it.
struct ComparedOption {
  const char* name;
  std::string (*text)(const TrainerOptions&);  ///< null: ranks may differ in it
};

/// Every option of TrainerOptions, in the order in which they are declared.
std::span<const ComparedOption> compared_options();

/// Returns what ranks that train together must have in common, a line each. `eval` may be null.
std::string consistency_fingerprint(const TrainerOptions& options,
                                    const parallel::GradientSync& gradient_sync, const data::Loader& train,
                                    const data::Loader* eval);

/// Returns the names that are in `all` and not in `some`, with spaces between.
std::string missing_from(const std::vector<std::string>& some, const std::vector<std::string>& all);

/// Returns what a checkpoint keeps of `dataset`; its fingerprint where `has_fingerprint`.
DataOfRun describe_data(const data::Dataset& dataset, bool has_fingerprint);

/// Throws: DataError where `now`, the training data, is other data than `then`, with which the checkpoint
/// `from` was made: other classes, or another number of samples. Logs a warning where only the fingerprint is
/// another one.
void check_same_data(const DataOfRun& then, const DataOfRun& now, const std::filesystem::path& from);

/// Says that a run with these options, of which `state` is left, is at its end.
void log_nothing_left(const RunState& state, const TrainerOptions& options);

/// Returns the name of the instruction set that LibTorch's kernels use here.
std::string instruction_set();

/// Throws: UsageError where a run with `virtual_ranks` (0: none) that resumes from `state`, which was read
/// from `from`, would have other bits: with other virtual ranks, threads or instructions.
void check_same_bits(const RunState& state, const std::filesystem::path& from, std::int64_t virtual_ranks);

/// Throws: UsageError where a run with these options cannot resume from `state`, which was read from `from`;
/// logs a warning where the numbers will not be the same bit for bit.
void check_resumable(const Task& task, const RunState& state, const std::filesystem::path& from,
                     const TrainerOptions& options, std::int64_t global_batch_size, int world_size);

}  // namespace cohort::train

#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/data/loader.h"
#include "cohort/train/metrics.h"
#include "cohort/train/task.h"

/// What a run needs besides modules and optimizers to resume exactly where it was.
namespace cohort::train {

/// The training data of a run, or its validation data.
struct DataOfRun {
  std::vector<std::string> classes;  ///< by label; empty: not known
  std::int64_t samples = 0;          ///< 0: not known
  std::string fingerprint;           ///< Dataset::fingerprint(); empty: not known
};

/// What changes of a run with its steps and epochs.
struct RunProgress {
  std::int64_t epoch = 0;  ///< epochs completed
  std::int64_t step = 0;   ///< steps completed
  data::LoaderState loader;
  std::map<std::string, MeterSet::Sum> meters;  ///< of the running epoch
  std::int64_t reported_step = 0;               ///< at which an epoch was evaluated and reported last
  double epoch_seconds = 0;                     ///< spent training in the running epoch
  double wait_seconds = 0;                      ///< of those, waiting for input
  double best = 0;
  std::int64_t best_epoch = 0;  ///< 0: none yet
  std::string best_metric;      ///< by which it was chosen; empty: none was, or an older version wrote this
  bool best_is_highest = true;
  std::int64_t non_finite_steps = 0;
};

struct RunState : RunProgress {
  std::uint64_t seed = 0;
  int threads = 0;
  int world_size = 1;              ///< ranks; 1 of an elastic run, whose processes change
  std::int64_t virtual_ranks = 0;  ///< 0: none
  std::string instruction_set;     ///< of LibTorch's kernels; empty: an older version wrote this
  std::int64_t global_batch_size = 0;
  DataOfRun data;
  DataOfRun eval_data;  ///< by which best was chosen
  /// Where the start went back to, as TrainerOptions::resume() named it, of an elastic run; empty: to the
  /// last checkpoint.
  std::string went_back_to;
  std::string description;  ///< TrainerOptions::description(); empty: an older version wrote this
};

/// Returns what `state`, a checkpoint's, says of its run. Throws: DataError where a Trainer did not write it.
RunState run_of(const nlohmann::json& state);

/// Returns what `state`, a checkpoint's, says of the training data: nothing where it says nothing. Throws:
/// DataError.
DataOfRun data_of(const nlohmann::json& state);

/// Returns everything that a checkpoint holds: the task's modules and optimizers, and `state`.
checkpoint::CheckpointContent capture(const Task& task, const RunState& state);

/// Puts the content of a checkpoint into the task and returns the rest. Throws: DataError for content of
/// another model or optimizer.
RunState restore(Task& task, const checkpoint::CheckpointContent& content);

/// Puts only the modules' parameters and buffers into the task.
void restore_modules(Task& task, const checkpoint::TensorMap& tensors);

}  // namespace cohort::train

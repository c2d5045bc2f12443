#pragma once

#include <filesystem>

#include "cohort/config/config.h"
#include "cohort/parallel/gradient_sync.h"

/// What `cohort train` does before it resumes a run. Internal to this module.
namespace cohort::train {

struct Resumption {
  config::Config config = {};  ///< of the run that follows
  bool is_resumed = false;     ///< from a checkpoint, which has the parameters
  bool keep_best = true;       ///< TrainerOptions::keep_best
};

/// Compares `config`, of a run in `folder`, with the configuration that made the checkpoint it resumes from,
/// and logs what takes effect. Returns `config` as it is for a fresh start. Else in what it returns:
/// - A step keeps its samples where `config` does not ask for others: train.global_batch_size is set then.
/// - A learning rate that is scaled by them stays: optim.lr_base_size is set then.
/// - With virtual ranks train.threads is that of the checkpoint, where it was 0.
/// - run.resume is the path of the checkpoint.
/// Writes nothing. Collective. Throws: ConfigError naming the keys that cannot change; DataError where
/// checkpoints are there and none can be used.
Resumption prepare_resume(config::Config config, const parallel::GradientSync& gradient_sync,
                          const std::filesystem::path& folder);

}  // namespace cohort::train

#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "cohort/config/config.h"
#include "cohort/train/callback.h"
#include "cohort/train/classes.h"

namespace cohort::elastic {
class Session;
}

/// The main job: what `cohort train` and `cohort eval` do, for a program of one's own.
namespace cohort::train {

/// What run_training() gives.
struct RunResult {
  FitResult fit;
  std::filesystem::path folder;  ///< of the run
  int rank = 0;                  ///< of this process
  std::string profile;           ///< the table of operators, where run.profile asked for one
};

/// Trains as `config` says, in a run folder, with all sinks and signal handling; blocks until the end.
/// `command` is written to run.json. Where a launcher has started several ranks it is collective: they train
/// one model, and rank 0 writes.
/// With distributed.elastic this is a process of `session`; where it is null, of the agent that has started
/// it. Then run.resume is auto where it is empty. Throws: ConfigError as check_config(), and where
/// distributed.elastic has no agent or no run.dir; any other cohort::Error.
RunResult run_training(const config::Config& config, const std::string& command,
                       std::shared_ptr<elastic::Session> session = nullptr);

/// Returns `config` for two steps of everything (training, evaluation, checkpoint), in a new run folder.
[[nodiscard]] config::Config limit_to_fast_dev_run(config::Config config);

/// Evaluates `checkpoint` (a checkpoint folder, or a safetensors file) on the validation data of `config`,
/// which may have only some of the classes that the checkpoint names. Throws: DataError for a class that the
/// model was not trained on; UsageError where ranks have read checkpoints of other names; any other
/// cohort::Error. Several ranks evaluate a share each, and all return the whole.
std::map<std::string, double> run_evaluation(const config::Config& config,
                                             const std::filesystem::path& checkpoint);
/// The same of a checkpoint that was read.
std::map<std::string, double> run_evaluation(const config::Config& config, const TrainedWeights& trained);

}  // namespace cohort::train

// A checkpoint is found by name or path, then its configuration, then its weights. The configuration inside
// the checkpoint is preferred: the run folder's config.yaml may be of a later start with other settings. A
// run that still trains may delete a checkpoint between these steps. So the three are tried again as one, and
// never a configuration of one checkpoint is used with weights of another.
#include "cohort/cli/internal/trained_model.h"

#include <optional>

#include "cohort/base/error.h"
#include "cohort/base/load_plugin.h"
#include "cohort/base/log.h"
#include "cohort/checkpoint/known.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/cli/internal/config_option.h"
#include "cohort/comm/job.h"
#include "cohort/config/resume.h"
#include "cohort/train/classes.h"
#include "cohort/train/weights.h"

namespace cohort::cli {

namespace fs = std::filesystem;

void TrainedModel::add_options(CLI::App& command) {
  command.add_option("-r,--run", run, "A run folder: its best checkpoint");
  add_config_option(command, config, "The configuration, when not the one that made the checkpoint");
  command.add_option("--checkpoint", checkpoint,
                     "best (the default), last, a checkpoint folder, a run folder or a .safetensors file");
  repeatable(command.add_option("--load", plugins,
                                "A shared library with models, data sets, operators or other parts of yours"),
             "FILE");
}

namespace {

constexpr int kMaxTries = 10;  // a save takes longer than to read what it has saved

bool is_name(const std::string& checkpoint) {
  return checkpoint == "best" || checkpoint == "last";
}

/// Says what `config` has that the configuration in the checkpoint has not.
void warn_of_other_inputs(const config::Config& config, const std::string& trained,
                          const std::string& checkpoint) {
  // A bare .safetensors file has no configuration to compare with.
  if (trained.empty() || comm::job_from_environment().rank != 0) return;
  try {
    const std::string changes =
        config::other_inputs(config::load_written_config_text(trained, checkpoint), config);
    if (changes.empty()) return;
    base::log_warning(base::concat(checkpoint, " was made with other settings: ", changes));
  } catch (const ConfigError&) {  // of another version
  }
}

}  // namespace

config::Config TrainedModel::load(const std::string& where) {
  if (!run.empty() && is_name(checkpoint)) {
    const fs::path folder = fs::path(run) / "checkpoints";
    const auto found = checkpoint::RunCheckpoints(folder).find(checkpoint);
    checkpoint = found.value_or(folder / checkpoint).string();  // a missing checkpoint is reported below
  }
  // Also where --checkpoint is a full path: a checkpoint may hold no configuration.
  if (config.empty() && run.empty()) {
    throw UsageError(where, "neither --run nor --config was given", "--run runs/NAME");
  }
  checkpoint = checkpoint::locate_checkpoint(checkpoint).string();
  std::error_code error;
  // Checked here, as a reader's message would name a file inside the folder and not what the user wrote.
  if (!fs::exists(checkpoint, error)) {
    throw DataError(where, base::concat("there is no checkpoint ", checkpoint),
                    "--run runs/NAME --checkpoint last, or the path of a checkpoint or .safetensors file");
  }
  checkpoint = train::find_weights(checkpoint).string();
  for (const std::string& plugin : plugins) base::load_plugin(plugin);
  const std::string trained = train::trained_config(checkpoint);
  // Cohort wrote this text, so keys of an earlier version are translated, not rejected.
  if (config.empty() && !trained.empty()) {
    return config::load_written_config_text(trained, base::concat("the configuration in ", checkpoint),
                                            overrides);
  }
  const std::string file = config.empty() ? (fs::path(run) / "config.yaml").string() : config;
  config::Config result = config::load_config(file, overrides);
  warn_of_other_inputs(result, trained, checkpoint);
  return result;
}

void TrainedModel::use(const std::string& where,
                       const std::function<void(const config::Config&, const train::TrainedWeights&)>& work) {
  const std::string asked = checkpoint;
  config::Config found;
  std::optional<train::TrainedWeights> trained;
  for (int tries = 1; !trained; ++tries) {
    checkpoint = asked;
    try {
      found = load(where);
      trained = train::read_trained_weights(checkpoint);
    } catch (const DataError&) {
      std::error_code error;
      // Only a name can mean another checkpoint a moment later, and only one that is gone was removed. All
      // other errors are what they are.
      const bool may_be_another = !run.empty() && is_name(asked) && !fs::exists(checkpoint, error);
      if (!may_be_another || tries == kMaxTries) throw;
    }
  }
  // Outside the loop: `work` may have effects and must run once. Its own DataErrors are not tried again.
  work(found, *trained);
}

}  // namespace cohort::cli

#include "cohort/cli/trained_model.h"

#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/cli/commands.h"
#include "cohort/cli/config_option.h"
#include "cohort/core/error.h"
#include "cohort/train/run.h"
#include "cohort/train/weights.h"

namespace cohort::cli {

namespace fs = std::filesystem;

void TrainedModel::add_options(CLI::App& command) {
  command.add_option("-r,--run", run, "A run folder: its config.yaml, its best checkpoint");
  add_config_option(command, config, "The configuration, when not that of --run");
  command.add_option("--checkpoint", checkpoint,
                     "best (the default), last, a checkpoint folder, a run folder or a .safetensors file");
  repeatable(
      command.add_option("--load", plugins, "A shared library with models, data sets or operators of yours"),
      "FILE");
}

train::Config TrainedModel::load(const std::string& where) {
  if (!run.empty()) {
    if (config.empty()) config = (fs::path(run) / "config.yaml").string();
    const bool is_name = checkpoint == "best" || checkpoint == "last";
    if (is_name) {
      const fs::path folder = fs::path(run) / "checkpoints";
      const auto found = checkpoint::RunCheckpoints(folder).find(checkpoint);
      checkpoint = found.value_or(folder / checkpoint).string();  // what is not there is said below
    }
  }
  if (config.empty()) {
    throw UsageError(where, "neither --run nor --config was given", "--run runs/NAME");
  }
  if (!fs::exists(checkpoint)) {
    throw DataError(where, core::concat("there is no checkpoint ", checkpoint),
                    "--run runs/NAME --checkpoint last, or the path of a checkpoint or .safetensors file");
  }
  checkpoint = train::find_weights(checkpoint).string();
  for (const std::string& plugin : plugins) train::load_plugin(plugin);
  return train::load_config(config, overrides);
}

}  // namespace cohort::cli

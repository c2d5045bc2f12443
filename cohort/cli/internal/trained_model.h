#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "cohort/config/config.h"
#include "cohort/train/classes.h"

namespace cohort::cli {

/// Which checkpoint, and of which configuration: the options of the commands that use a trained model. The
/// configuration is the one in the checkpoint; that of the run folder may be of a later start.
struct TrainedModel {
  std::string config;
  std::string run;
  std::string checkpoint = "best";
  std::vector<std::string> overrides;
  std::vector<std::string> plugins;

  /// Adds --run, --config, --checkpoint and --load.
  void add_options(CLI::App& command);
  /// Loads the plug-ins and the configuration; `checkpoint` is a path afterwards.
  /// Throws: UsageError and DataError in the name of `where`, "cli.eval".
  config::Config load(const std::string& where);
  /// Calls `work` once, with what load() returns and what the checkpoint holds. Looks for it again where a
  /// run that saves has removed its best or last checkpoint (--run) before it was read. Throws: as load(),
  /// train::read_trained_weights() and `work`.
  void use(const std::string& where,
           const std::function<void(const config::Config&, const train::TrainedWeights&)>& work);
};

}  // namespace cohort::cli

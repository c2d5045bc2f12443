#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cohort/config/config.h"

/// --config and the `key=value` beside it, as several commands take them.
namespace cohort::cli {

/// Adds -c, --config to `command`; parsing throws UsageError where it stands twice.
void add_config_option(CLI::App& command, std::string& config, const std::string& help);

/// Returns the configuration in the file `config`, or the defaults where that is empty, with `overrides`
/// applied. Throws: UsageError where there is neither a file nor an override that says where the data is; as
/// config::load_config().
config::Config load_config(const std::string& where, const std::string& config,
                           const std::vector<std::string>& overrides);

}  // namespace cohort::cli

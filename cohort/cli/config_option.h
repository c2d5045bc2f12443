#pragma once

#include <CLI/CLI.hpp>
#include <string>

/// The option --config, as several commands take it.
namespace cohort::cli {

/// Adds -c, --config to `command`; parsing throws UsageError where it stands twice.
void add_config_option(CLI::App& command, std::string& config, const std::string& help);

}  // namespace cohort::cli

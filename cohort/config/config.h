#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cohort/config/types.h"

/// What a run is: read from YAML, changed by `key=value`, written back as YAML.
///
/// The settings and their defaults are in types.h. Type, range and help text of each key stand in one
/// table (internal/tables_*.cpp), which the parser, the dump, `--help-config` and docs/reference/keys.md
/// share. No LibTorch: YAML is untrusted.
///
///     auto config = cohort::config::load_config("configs/fashion-vgg.yaml", {"optim.lr=0.05"});
///     for (const auto& line : config.warnings) cohort::base::log_warning(line);
namespace cohort::config {

/// Reads the YAML file `path`, then applies `overrides` (`section.key=value`, the value in YAML) in order.
/// A file with upper-case keys (MODEL, LR, ...) is a flat file of published VGG scripts:
/// docs/guide/config.md.
/// Throws: ConfigError naming file, line, column and key; DataError if `path` cannot be read.
Config load_config(const std::string& path, const std::vector<std::string>& overrides = {});

/// The same for text that is in memory; `name` stands for the file in messages.
Config load_config_text(std::string_view text, const std::string& name,
                        const std::vector<std::string>& overrides = {});

/// The same for text that Cohort wrote, such as a checkpoint's: keys that an earlier version used are
/// translated. load_config() does so with the config.yaml of a run folder.
Config load_written_config_text(std::string_view text, const std::string& name,
                                const std::vector<std::string>& overrides = {});

/// Checks what spans several keys (lengths of mean and std, one warm-up only, ...): for a Config made in
/// code. Appends to `warnings` the keys that were set but have no effect, each once. Throws: ConfigError.
void check_config(Config& config);

/// Returns YAML with every key, which reads back to an equal Config.
std::string dump_config(const Config& config);

/// Returns the reference of all keys as plain text (for `--help-config`).
std::string config_help();

/// Returns the reference of all keys as Markdown (docs/reference/keys.md carries it).
std::string config_markdown();

}  // namespace cohort::config

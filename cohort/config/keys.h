#pragma once

#include <span>
#include <string>
#include <string_view>

#include "cohort/config/key.h"

/// The one table of keys: the parser, the checks, the dump, `--help-config` and docs/reference/keys.md read
/// it.
namespace cohort::config {

/// All keys, in the order in which they are written.
std::span<const ConfigKey> config_keys();
/// Returns the key named `section.key`, or null.
const ConfigKey* find_key(std::string_view name);
/// model, data, optim, schedule, train, distributed, comm, run.
std::span<const std::string> config_sections();

/// Returns what becomes of a key that differs on resume, in words: "takes effect", "rejected", "cannot
/// matter".
std::string resume_text(const ConfigKey& key);

/// Returns what a key accepts, in words: "a whole number >= 1", "one of sgd, adam, adamw".
std::string expectation(const ConfigKey& key);

/// Returns an empty text when the value of `key` in `config` is allowed, else what was found ("-1").
std::string rejected_value(const ConfigKey& key, Config& config);

/// Returns the value of `key` as YAML on one line, or (TransformList, map) indented lines below it.
std::string value_text(const ConfigKey& key, Config& config);

/// True when the value of `key` is the same in both.
bool same_value(const ConfigKey& key, Config& a, Config& b);

}  // namespace cohort::config

#pragma once

#include <string>
#include <string_view>

#include "cohort/config/yaml_text.h"

/// Keys and values of earlier versions of Cohort. In a user's file and on the command line each of them is an
/// error that names the new one. A configuration that an earlier version wrote is translated.
namespace cohort::config {

/// Returns what to write in place of `key` with `value`, such as "distributed.model: pipeline"; empty: both
/// are known today, or never were. `key` is a whole name, also of an entry of a map
/// ("distributed.place.layer1").
std::string renamed_to(std::string_view key, std::string_view value);

/// Returns `document` with the keys and values of earlier versions replaced. What is not a map of sections
/// stays as it is: the reader says what is wrong with it.
YAML::Node translate_renamed_keys(const YAML::Node& document);

}  // namespace cohort::config

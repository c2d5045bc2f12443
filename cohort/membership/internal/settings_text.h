#pragma once

#include <nlohmann/json.hpp>

#include "cohort/membership/run_settings.h"

namespace cohort::membership {

nlohmann::json json_of(const RunSettings& settings);
/// Throws: CommError.
RunSettings settings_of(const nlohmann::json& json);

}  // namespace cohort::membership

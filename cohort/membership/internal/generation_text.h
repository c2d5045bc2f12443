#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "cohort/membership/generation.h"

namespace cohort::membership {

nlohmann::json json_of(const std::vector<MemberInfo>& members);
/// Throws: CommError.
std::vector<MemberInfo> members_of(const nlohmann::json& list);

nlohmann::json json_of(const Generation& generation);
/// Throws: CommError.
Generation generation_of(const nlohmann::json& object);

}  // namespace cohort::membership

#pragma once

#include <string_view>

namespace cohort::core {

/// Returns Cohort's version, as "0.1.0".
std::string_view version();

}  // namespace cohort::core

#pragma once

#include <string_view>

namespace cohort::base {

/// Returns Cohort's version, as "0.1.0".
std::string_view version();

}  // namespace cohort::base

#pragma once

#include <string>

namespace cohort::core {

/// Returns this host's name; "localhost" where the system has none. No LibTorch.
std::string host_name();

}  // namespace cohort::core

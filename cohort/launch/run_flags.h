#pragma once

#include <string>

#include "cohort/launch/run_options.h"

/// The table behind run_flags(), and limits. Not for users of the library.
namespace cohort::launch {

constexpr int kMaxLocalRanks = 4096;
constexpr int kMaxNodes = 100'000;

/// Returns the flag of that name, or nullptr.
const RunFlag* find_run_flag(const std::string& name);

}  // namespace cohort::launch

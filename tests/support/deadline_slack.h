#pragma once

#include <chrono>
#include <cstdlib>

namespace cohort::test {

/// How long after its deadline an error may come: two cores that build beside it take longer.
inline std::chrono::milliseconds deadline_slack() {
  return std::chrono::milliseconds(std::getenv("CI") != nullptr ? 2000 : 500);
}

}  // namespace cohort::test

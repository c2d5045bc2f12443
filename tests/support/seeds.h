#pragma once

#include "tests/support/environment.h"

namespace cohort::test {

/// The numbers [first, end) of the programs that a test makes at random: `usual` of them, or as many as
/// COHORT_RANDOM_PROGRAMS says, from COHORT_RANDOM_FIRST on. A test that fails names the number of its
/// program.
struct Seeds {
  unsigned first = 0, end = 0;

  static Seeds usual(unsigned usual) {
    const auto first = static_cast<unsigned>(env_number("COHORT_RANDOM_FIRST", 0));
    return {first, first + static_cast<unsigned>(env_number("COHORT_RANDOM_PROGRAMS", usual))};
  }
  unsigned count() const { return end - first; }
};

}  // namespace cohort::test

#pragma once

#include <chrono>

#include "cohort/bench/timeit.h"

namespace cohort::test {

/// Time that passes only when the work says so.
struct FakeClock {
  std::chrono::nanoseconds now{0};
  bench::Clock clock() {
    return [this] { return now; };
  }
};

}  // namespace cohort::test

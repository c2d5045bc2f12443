#pragma once

#include <chrono>

#include "cohort/base/threads/deadline.h"

namespace cohort::test {

/// For a wait that ends in no time where all is well.
inline base::Deadline patience() {
  return base::Deadline(std::chrono::seconds(60));
}

}  // namespace cohort::test

#pragma once

#include <chrono>
#include <functional>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"

/// What other threads or processes bring about, and notify no test of.
namespace cohort::test {

/// Whether the condition holds within 20 s.
inline bool comes_true(const std::function<bool()>& condition) {
  return base::poll_until(condition, base::Deadline(std::chrono::seconds(20)));
}

/// Returns when the condition holds. Throws: TimeoutError after 20 s.
inline void wait_until(const std::function<bool()>& condition) {
  if (!comes_true(condition)) throw TimeoutError("test", "waited 20 s for another thread", "");
}

}  // namespace cohort::test

#pragma once

#include <string>

#include "cohort/base/threads/deadline.h"

/// What a failing call asks of the hang detector of its job. Internal.
namespace cohort::comm {

class HangDetector {
 public:
  virtual ~HangDetector() = default;
  /// A call failed: has this rank's answer left for the others, and on the first rank that fails the table of
  /// all logged. Does not wait.
  virtual void failed(const std::string& what) = 0;
  /// Until what failed() has begun is done, or the deadline. It continues after that, and its end waits
  /// for it.
  virtual void wait_for_table(base::Deadline until) = 0;
};

}  // namespace cohort::comm

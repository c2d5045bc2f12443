#pragma once

#include <string>

/// What a failing call asks of the watch of its job. Internal.
namespace cohort::comm {

class Watch {
 public:
  virtual ~Watch() = default;
  /// A call failed: leaves this rank's answer for the others, and on the first rank that fails logs the table
  /// of all. Returns within 3 s.
  virtual void failed(const std::string& what) = 0;
};

}  // namespace cohort::comm

#pragma once

#include <span>
#include <string>
#include <vector>

#include "cohort/elastic/internal/straggler_detector.h"
#include "cohort/membership/generation.h"

namespace cohort::elastic {

/// Names slow processes of a run: process 0 in its log, each process on its timeline. Threads: one.
class StragglerWatch {
 public:
  /// This is process `process` of a generation from here on.
  void enter(const membership::Generation& generation, int process);
  /// A step is committed, in which each process has worked for so many seconds; 0: not known.
  void add_step(std::span<const double> seconds);

 private:
  void log(const StragglerNews& news) const;

  StragglerDetector detector_;
  bool is_first_ = false;
  std::vector<std::string> names_;  // of processes, for people
  std::vector<const char*> marks_;  // of slow processes on the timeline
};

}  // namespace cohort::elastic

#pragma once

#include <cstdint>

#include "cohort/train/callback.h"

namespace cohort::train {

/// Time, waiting and samples of the steps since the last report.
class Throughput {
 public:
  /// Adds time in which a step waited for data.
  void add_wait(double seconds) { wait_ += seconds; }
  void add_samples(std::int64_t samples) { samples_ += samples; }
  void add_step(double seconds) {
    seconds_ += seconds;
    ++steps_;
  }

  double wait() const { return wait_; }
  /// Sets the wait to the mean over ranks, before a report.
  void set_wait(double seconds) { wait_ = seconds; }

  /// Fills rates and the time that `steps_left` steps take. 0: not known, as no step was added.
  void fill(StepReport& report, std::int64_t steps_left) const {
    report.samples_per_second = seconds_ > 0 ? static_cast<double>(samples_) / seconds_ : 0;
    report.data_wait_share = seconds_ > 0 ? wait_ / seconds_ : 0;
    // None: a report that another process owed.
    if (steps_ > 0)
      report.seconds_left = seconds_ / static_cast<double>(steps_) * static_cast<double>(steps_left);
  }

  void reset() { *this = Throughput(); }

 private:
  double seconds_ = 0, wait_ = 0;
  std::int64_t samples_ = 0, steps_ = 0;
};

}  // namespace cohort::train

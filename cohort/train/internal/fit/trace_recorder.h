#pragma once

#include <cstdint>

#include "cohort/base/timeline.h"
#include "cohort/train/internal/fit/rank_coordinator.h"
#include "cohort/train/trainer_options.h"

namespace cohort::train {

/// Records the first steps of a fit on the timeline, and writes them to trace.json. Its functions are
/// collective, but for the destructor.
class TraceRecorder {
 public:
  /// Both must outlive this.
  TraceRecorder(const TrainerOptions& options, const RankCoordinator& ranks)
      : options_(options), ranks_(ranks) {}
  /// A fit that throws records no more, and writes nothing: that is collective.
  ~TraceRecorder() {
    if (recording_) base::Timeline::stop();
  }
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  void begin() {
    recording_ = options_.trace_steps() > 0;
    if (recording_) base::Timeline::start();
  }
  /// So many steps were made since begin(): end() is to be called.
  bool is_over(std::int64_t steps) const { return recording_ && steps >= options_.trace_steps(); }
  /// Writes what was recorded, once.
  void end() {
    if (!recording_) return;  // the timeline may record for somebody else
    recording_ = false;
    base::Timeline::stop();
    if (!options_.run_dir().empty()) ranks_.write_trace(options_.run_dir() / "trace.json");
  }

 private:
  const TrainerOptions& options_;
  const RankCoordinator& ranks_;
  bool recording_ = false;
};

}  // namespace cohort::train

#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "cohort/data/loader.h"
#include "cohort/train/internal/fit/rank_coordinator.h"
#include "cohort/train/internal/fit/run_state.h"
#include "cohort/train/metrics.h"
#include "cohort/train/trainer_options.h"

namespace cohort::train {

/// How far a fit has come: what a checkpoint keeps of it, and the metrics of the running epoch.
class FitProgress {
 public:
  /// Both must outlive this.
  FitProgress(const TrainerOptions& options, const RankCoordinator& ranks)
      : options_(options), ranks_(ranks) {}

  /// `meters` of it are filled by total_meters() alone.
  RunState state;

  /// The fit continues where `saved`, a checkpoint's, ends.
  void continue_from(RunState saved);

  /// An epoch begins, or continues in its middle after a resume. Brings `loader` there.
  void begin_epoch(data::Loader& loader);
  void complete_epoch();
  /// A step was made, and `loader` is the position after it.
  void step_made(data::LoaderState loader);
  /// Adds the numbers of a step to the averages of the epoch.
  void add(const StepMetrics& metrics) { meters_.add(metrics); }
  void add(const RankCoordinator::MetricSums& sums) { meters_.add(sums); }

  /// Returns the averages of the running epoch over all ranks. Collective.
  std::map<std::string, double> averages();
  /// Fills state.meters with sums over all ranks. Collective.
  void total_meters();
  /// The fit goes back to `earlier`, of this call of fit().
  void go_back_to(const RunProgress& earlier);

  /// Steps that this call of fit() made.
  std::int64_t steps_made() const { return steps_made_; }
  bool step_limit_reached() const;
  /// Nothing is left to do.
  bool is_over() const;
  /// Steps that are left of the run. `steps_per_epoch`: at least 1.
  std::int64_t steps_left(std::int64_t steps_per_epoch) const;

 private:
  RankCoordinator::MetricSums total();
  /// Meters continue from `total`, the sum over ranks, which one rank must hold alone.
  void keep_total(const std::map<std::string, MeterSet::Sum>& total);

  const TrainerOptions& options_;
  const RankCoordinator& ranks_;
  MeterSet meters_;
  std::int64_t steps_made_ = 0;
  bool in_epoch_ = false;  // the first epoch continues from a checkpoint
};

}  // namespace cohort::train

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cohort/train/callback.h"
#include "cohort/train/internal/fit/fit_progress.h"
#include "cohort/train/internal/fit/rank_coordinator.h"
#include "cohort/train/internal/fit/throughput.h"
#include "cohort/train/internal/fit/trace_recorder.h"
#include "cohort/train/trainer_options.h"

namespace cohort::train {

/// Returns what a fit tells that has ended at `state`, by `stop_signal` unless it is 0; without metrics and
/// the last checkpoint.
FitResult result_of(const RunProgress& state, int stop_signal, int rank);

/// Makes the reports of a fit, and gives them to the callbacks in their order.
class FitReports {
 public:
  /// All must outlive this.
  FitReports(const TrainerOptions& options, const std::vector<std::shared_ptr<Callback>>& callbacks,
             const RankCoordinator& ranks)
      : trace(options, ranks), options_(options), callbacks_(callbacks), ranks_(ranks) {}

  /// Time, waiting and samples since the last report that was logged.
  Throughput throughput;
  /// The timeline of the first steps.
  TraceRecorder trace;

  /// The callbacks hear it where this rank reports, else at a later start_anew(). They hear it once.
  void fit_begins(const FitInfo& start);
  /// The start counts from here on. The callbacks hear it once.
  void start_counts();
  /// Another process may have written the run's files: callbacks hear of `start` at the next start_counts(),
  /// and of reports that they have heard before.
  void start_anew(const FitInfo& start);
  const FitInfo& start() const { return start_; }
  bool counts() const { return counts_; }
  /// Before a step. The callbacks hear the first one of those that this rank reports.
  void batch_loaded(data::Batch& batch);

  /// Whether the report of `step` has averages: it follows from the number alone, so all ranks agree.
  bool is_logged(std::int64_t step) const {
    return options_.log_every() > 0 && step % options_.log_every() == 0;
  }
  /// After a step, which took `seconds` by itself and was added to `throughput`. Collective where the step is
  /// logged. A step that callbacks have heard of is not told again.
  void step_ended(FitProgress& progress, double lr, double seconds);

  /// Returns the report of the running epoch, before an evaluation. Collective.
  EpochReport epoch_report(FitProgress& progress, double lr) const;
  void epoch_ended(const EpochReport& report);

  void saving(std::int64_t step);
  /// Adds the metrics of the last epoch, and returns the result. The callbacks hear it once, unless the fit
  /// has made more steps since, or start_anew() was called.
  FitResult fit_ends(FitResult result);
  /// Of the last epoch, whoever reports it.
  void set_last_metrics(std::map<std::string, double> metrics) { last_metrics_ = std::move(metrics); }
  const std::map<std::string, double>& last_metrics() const { return last_metrics_; }

 private:
  void report_begin();
  template <typename Fn>
  void notify(const Fn& fn) {
    if (!ranks_.reports()) return;
    for (const std::shared_ptr<Callback>& callback : callbacks_) fn(*callback);
  }

  const TrainerOptions& options_;
  const std::vector<std::shared_ptr<Callback>>& callbacks_;
  const RankCoordinator& ranks_;
  FitInfo start_;
  std::map<std::string, double> last_metrics_;
  std::int64_t told_step_ = -1, told_epoch_step_ = -1;  // the last ones of which callbacks heard a report
  std::int64_t told_end_step_ = -1;                     // likewise, of the end
  bool counts_ = false;
  bool seen_first_batch_ = false, is_begin_reported_ = false;
};

}  // namespace cohort::train

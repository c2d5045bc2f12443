// A report is a function of the progress and of the times since the last one. In an elastic run what follows
// a step may be made again, so the numbers of the last step and epoch that were told are kept.
#include "cohort/train/internal/fit/fit_reports.h"

#include <utility>

#include "cohort/train/internal/fit/evaluation.h"

namespace cohort::train {

FitResult result_of(const RunProgress& state, int stop_signal, int rank) {
  FitResult result;
  result.finished = stop_signal == 0;
  result.signal = stop_signal;
  result.rank = rank;
  result.epochs = state.epoch;
  result.steps = state.step;
  result.best = state.best;
  result.best_epoch = state.best_epoch;
  return result;
}

void FitReports::fit_begins(const FitInfo& start) {
  start_ = start;
  report_begin();
}

// Which rank reports may change.
void FitReports::report_begin() {
  if (!ranks_.reports() || std::exchange(is_begin_reported_, true)) return;
  notify([&](Callback& callback) { callback.on_fit_begin(start_); });
}

void FitReports::start_counts() {
  counts_ = true;
  notify([&](Callback& callback) { callback.on_start_counts(start_); });
}

void FitReports::start_anew(const FitInfo& start) {
  start_ = start;
  counts_ = false;
  told_step_ = told_epoch_step_ = told_end_step_ = -1;
  report_begin();
}

void FitReports::batch_loaded(data::Batch& batch) {
  if (!ranks_.reports() || std::exchange(seen_first_batch_, true)) return;
  notify([&](Callback& callback) { callback.on_first_batch(batch); });
}

void FitReports::step_ended(FitProgress& progress, double lr, double seconds) {
  const RunState& state = progress.state;
  if (std::exchange(told_step_, state.step) == state.step) return;
  StepReport report;
  report.epoch = state.epoch + 1;
  report.epochs = options_.epochs();
  report.step = state.step;
  report.step_in_epoch = state.step - state.epoch * start_.steps_per_epoch;
  report.steps_per_epoch = start_.steps_per_epoch;
  report.lr = lr;
  report.seconds = seconds;
  report.logged = is_logged(state.step);
  if (report.logged) {
    report.averages = progress.averages();
    throughput.set_wait(ranks_.mean(throughput.wait()));
  }
  throughput.fill(report, progress.steps_left(start_.steps_per_epoch));
  notify([&](Callback& callback) { callback.on_step_end(report); });
  if (report.logged) throughput.reset();
}

EpochReport FitReports::epoch_report(FitProgress& progress, double lr) const {
  const RunState& state = progress.state;
  EpochReport report;
  report.epoch = state.epoch + 1;
  report.epochs = options_.epochs();
  report.step = state.step;
  report.lr = lr;
  report.seconds = state.epoch_seconds;
  if (state.epoch_seconds > 0) {
    report.data_wait_share = state.wait_seconds / state.epoch_seconds;
    report.samples_per_second = static_cast<double>(state.loader.samples_consumed) / state.epoch_seconds;
  }
  report.metrics = with_prefix("train_", progress.averages());
  return report;
}

void FitReports::epoch_ended(const EpochReport& report) {
  if (std::exchange(told_epoch_step_, report.step) == report.step) return;
  notify([&](Callback& callback) { callback.on_epoch_end(report); });
}

void FitReports::saving(std::int64_t step) {
  notify([&](Callback& callback) { callback.on_save(step); });
}

FitResult FitReports::fit_ends(FitResult result) {
  result.metrics = last_metrics_;
  // The processes of an elastic run may change before all of them have ended.
  if (ranks_.reports() && std::exchange(told_end_step_, result.steps) != result.steps) {
    notify([&](Callback& callback) { callback.on_fit_end(result); });
  }
  return result;
}

}  // namespace cohort::train

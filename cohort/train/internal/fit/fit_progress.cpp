// Meters hold what this rank has added since the last total. A total is kept by one rank alone, unless each
// rank has the metrics of all: the next total counts it once. A fit that goes back continues as after a
// resume, in the middle of its epoch.
#include "cohort/train/internal/fit/fit_progress.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cohort/train/internal/fit/evaluation.h"

namespace cohort::train {

void FitProgress::continue_from(RunState saved) {
  state = std::move(saved);
  keep_total(state.meters);
  in_epoch_ = true;
}

void FitProgress::begin_epoch(data::Loader& loader) {
  // Meters and times are those of a new epoch, or continue as the checkpoint has them.
  if (in_epoch_) {
    loader.restore(state.loader);
  } else {
    loader.set_epoch(state.epoch);
  }
  in_epoch_ = false;
}

void FitProgress::complete_epoch() {
  ++state.epoch;
  state.loader = {.epoch = state.epoch, .samples_consumed = 0};
  meters_.reset();
  state.epoch_seconds = state.wait_seconds = 0;
}

void FitProgress::step_made(data::LoaderState loader) {
  ++state.step;
  ++steps_made_;
  state.loader = std::move(loader);
}

std::map<std::string, double> FitProgress::averages() {
  return averages_of(total());
}

RankCoordinator::MetricSums FitProgress::total() {
  return ranks_.has_all_steps() ? meters_.sums() : ranks_.total(meters_);
}

void FitProgress::total_meters() {
  state.meters = total();
  // The sums of all ranks are now with one: each rank would add them once more at the next total.
  keep_total(state.meters);
}

void FitProgress::keep_total(const std::map<std::string, MeterSet::Sum>& total) {
  const bool holds = ranks_.is_first() || ranks_.has_all_steps();
  meters_.restore(holds ? total : RankCoordinator::MetricSums());
}

void FitProgress::go_back_to(const RunProgress& earlier) {
  static_cast<RunProgress&>(state) = earlier;
  keep_total(state.meters);
  in_epoch_ = true;
}

bool FitProgress::step_limit_reached() const {
  return options_.max_steps() > 0 && state.step >= options_.max_steps();
}

bool FitProgress::is_over() const {
  // An epoch that the limit cut short is reported too: a signal may have come first.
  return state.epoch >= options_.epochs() || (step_limit_reached() && state.reported_step == state.step);
}

std::int64_t FitProgress::steps_left(std::int64_t steps_per_epoch) const {
  // As many epochs as a number can say: such a run ends by max_steps.
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  std::int64_t total =
      options_.epochs() > kMax / steps_per_epoch ? kMax : options_.epochs() * steps_per_epoch;
  if (options_.max_steps() > 0) total = std::min(total, options_.max_steps());
  return std::max<std::int64_t>(0, total - state.step);
}

}  // namespace cohort::train

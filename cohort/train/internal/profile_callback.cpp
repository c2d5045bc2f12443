#include "cohort/train/internal/profile_callback.h"

#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"

namespace cohort::train {

ProfileCallback::ProfileCallback(std::filesystem::path file, std::int64_t steps)
    : file_(std::move(file)), steps_(steps) {}

void ProfileCallback::on_step_end(const StepReport&) {
  ++seen_;
  // The first steps allocate, choose kernels and fill caches: they are not what a run spends its time on.
  if (seen_ == kWarmUp) profiler_.emplace();
  if (seen_ == kWarmUp + steps_) finish();
}

void ProfileCallback::on_fit_end(const FitResult&) {
  // The run ended early: a table of fewer steps is better than none.
  if (profiler_ && seen_ > kWarmUp) finish();
  profiler_.reset();
  if (table_.empty()) {
    base::log_warning(base::concat("nothing was profiled: the run ended after ", seen_,
                                   " steps, and the first ", kWarmUp, " are left out"));
  }
}

void ProfileCallback::finish() {
  const bench::Profile profile = profiler_->stop(seen_ - kWarmUp);
  profiler_.reset();
  table_ = profile.table();
  profile.write_trace(file_);
}

}  // namespace cohort::train

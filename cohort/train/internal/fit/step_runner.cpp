#include "cohort/train/internal/fit/step_runner.h"

#include <cmath>

#include "cohort/base/error.h"
#include "cohort/core/device.h"
#include "cohort/train/internal/fit/rates.h"
#include "cohort/train/internal/fit/share_walk.h"

namespace cohort::train {

void StepRunner::read_lr() {
  lr_ = current_lr(task_);
}

void StepRunner::check_step(const parallel::VirtualRankSync* virtual_ranks, const StepMetrics& metrics,
                            const optim::NonFinite& non_finite) const {
  const std::int64_t shares = virtual_ranks == nullptr ? ranks_.size() : virtual_ranks->num_virtual_ranks();
  // A user's task averages by itself. One that forgets would train a model on each rank without an error.
  if (shares > 1 && task_.num_averages() == averages_) {
    throw UsageError("train.step",
                     base::concat("train_step of this task did not average gradients over the ", shares,
                                  virtual_ranks == nullptr ? " ranks: each would train a model of its own"
                                                           : " virtual ranks: most would have no part in it"),
                     "average_gradients(*optimizer, batch.whole_size) between backward and step");
  }
  if (virtual_ranks == nullptr) return;
  if (ranks_.has_all_steps() && !metrics.empty() && task_.num_reports() == reports_) {
    throw UsageError("train.step",
                     "train_step of this task returned metrics that it had not reported before "
                     "average_gradients(): in an elastic run a process that dies would take them with it",
                     "report_metrics(metrics) before average_gradients()");
  }
  // Each process would decide by its own virtual ranks, and the others would continue.
  const bool is_known = !task_.last_average().ok() || non_finite.on_cpu;
  for (const Metric& metric : metrics) {
    if (is_known || metric.name != "loss" || metric.device_value.defined() || std::isfinite(metric.value))
      continue;
    throw UsageError(
        "train.step",
        "a loss of a virtual rank is not finite, and average_gradients() was not told: the other "
        "virtual ranks have made the step",
        "average_gradients(*optimizer, batch.whole_size, finite), or report_metrics(metrics) before");
  }
}

std::vector<CheckedStep> StepRunner::run(data::Batch& batch, std::int64_t steps_before) {
  const auto reseed = [this, steps_before](std::int64_t share) {
    core::reseed_generators(options_.seed(), static_cast<std::uint64_t>(steps_before),
                            static_cast<std::uint64_t>(share));
  };
  apply_schedules(task_, steps_before);
  read_lr();
  averages_ = task_.num_averages();
  reports_ = task_.num_reports();
  task_.take_reported_metrics();  // of a step that was given up
  if (!options_.stop_on_non_finite()) buffers_.keep(task_);
  parallel::VirtualRankSync* const virtual_ranks =
      options_.gradient_sync() == nullptr ? nullptr : options_.gradient_sync()->virtual_ranks();
  // Nothing of the generators is saved: what a step draws follows from its number.
  if (virtual_ranks == nullptr) {
    reseed(ranks_.rank());
  } else {
    go_through_shares(batch, *virtual_ranks, reseed, part_listener_);
  }
  const StepMetrics metrics = task_.train_step(batch);
  const optim::NonFinite non_finite = task_.take_non_finite();
  if (!options_.stop_on_non_finite()) buffers_.restore_unless_finite(metrics, non_finite);
  check_step(virtual_ranks, metrics, non_finite);
  ranks_.step_done();
  return check_.add(steps_before + 1, metrics, non_finite);
}

}  // namespace cohort::train

#include "cohort/train/internal/fit/step_runner.h"

#include "cohort/base/error.h"
#include "cohort/core/device.h"
#include "cohort/train/internal/fit/rates.h"

namespace cohort::train {

void StepRunner::read_lr() {
  lr_ = current_lr(task_);
}

std::vector<CheckedStep> StepRunner::run(data::Batch& batch, std::int64_t steps_before) {
  // Nothing of the generators is saved: what a step draws follows from its number.
  core::reseed_generators(options_.seed(), static_cast<std::uint64_t>(steps_before),
                          static_cast<std::uint64_t>(ranks_.rank()));
  apply_schedules(task_, steps_before);
  read_lr();
  // A user's task averages by itself. One that forgets would train a model on each rank without an error.
  const std::int64_t averages = task_.num_averages();
  if (!options_.stop_on_non_finite()) buffers_.keep(task_);
  const StepMetrics metrics = task_.train_step(batch);
  const optim::NonFinite non_finite = task_.take_non_finite();
  if (!options_.stop_on_non_finite()) buffers_.restore_unless_finite(metrics, non_finite);
  if (ranks_.size() > 1 && task_.num_averages() == averages) {
    throw UsageError("train.step",
                     base::concat("train_step of this task did not average gradients over the ",
                                  ranks_.size(), " ranks: each would train a model of its own"),
                     "average_gradients(*optimizer, batch.size) between backward and step");
  }
  ranks_.step_done();
  return check_.add(steps_before + 1, metrics, non_finite);
}

}  // namespace cohort::train

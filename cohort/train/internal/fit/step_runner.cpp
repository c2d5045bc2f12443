#include "cohort/train/internal/fit/step_runner.h"

#include "cohort/base/error.h"
#include "cohort/core/device.h"
#include "cohort/train/internal/fit/rates.h"
#include "cohort/train/internal/fit/share_walk.h"

namespace cohort::train {

void StepRunner::read_lr() {
  lr_ = current_lr(task_);
}

std::vector<CheckedStep> StepRunner::run(data::Batch& batch, std::int64_t steps_before) {
  const auto reseed = [this, steps_before](std::int64_t share) {
    core::reseed_generators(options_.seed(), static_cast<std::uint64_t>(steps_before),
                            static_cast<std::uint64_t>(share));
  };
  apply_schedules(task_, steps_before);
  read_lr();
  // A user's task averages by itself. One that forgets would train a model on each rank without an error.
  const std::int64_t averages = task_.num_averages();
  if (!options_.stop_on_non_finite()) buffers_.keep(task_);
  parallel::VirtualRankSync* const virtual_ranks =
      options_.gradient_sync() == nullptr ? nullptr : options_.gradient_sync()->virtual_ranks();
  // Nothing of the generators is saved: what a step draws follows from its number.
  if (virtual_ranks == nullptr) {
    reseed(ranks_.rank());
  } else {
    go_through_shares(batch, *virtual_ranks, reseed);
  }
  const StepMetrics metrics = task_.train_step(batch);
  const optim::NonFinite non_finite = task_.take_non_finite();
  if (!options_.stop_on_non_finite()) buffers_.restore_unless_finite(metrics, non_finite);
  const std::int64_t shares = virtual_ranks == nullptr ? ranks_.size() : virtual_ranks->num_virtual_ranks();
  if (shares > 1 && task_.num_averages() == averages) {
    throw UsageError("train.step",
                     base::concat("train_step of this task did not average gradients over the ", shares,
                                  virtual_ranks == nullptr ? " ranks: each would train a model of its own"
                                                           : " virtual ranks: most would have no part in it"),
                     "average_gradients(*optimizer, batch.whole_size) between backward and step");
  }
  ranks_.step_done();
  return check_.add(steps_before + 1, metrics, non_finite);
}

}  // namespace cohort::train

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "cohort/data/loader.h"
#include "cohort/train/internal/fit/buffers.h"
#include "cohort/train/internal/fit/rank_coordinator.h"
#include "cohort/train/internal/fit/step_check.h"
#include "cohort/train/task.h"
#include "cohort/train/trainer_options.h"

namespace cohort::train {

/// Makes the steps of a fit: generators, rates, the task's own step, and the check of its numbers.
class StepRunner {
 public:
  /// All must outlive this.
  StepRunner(const TrainerOptions& options, Task& task, const RankCoordinator& ranks)
      : options_(options), task_(task), ranks_(ranks) {}

  /// Where there are virtual ranks `listener` hears of each part of a batch before anything of it is
  /// computed.
  void set_part_listener(std::function<void(const data::Batch& part)> listener) {
    part_listener_ = std::move(listener);
  }

  /// Makes the step after `steps_before` ones. Returns the steps of which it is known now whether their
  /// numbers were finite, oldest first. Throws: UsageError where the task did not average over ranks, or did
  /// not say what ranks must know before.
  std::vector<CheckedStep> run(data::Batch& batch, std::int64_t steps_before);
  /// Returns the step of which it was not known yet. Blocking: waits for the accelerator.
  std::optional<CheckedStep> take_pending() { return check_.take_pending(); }

  /// The rate of the last step; of a resumed run before its first one, the checkpoint's.
  double lr() const { return lr_; }
  void read_lr();

 private:
  void check_step(const parallel::VirtualRankSync* virtual_ranks, const StepMetrics& metrics,
                  const optim::NonFinite& non_finite) const;

  const TrainerOptions& options_;
  Task& task_;
  const RankCoordinator& ranks_;
  std::function<void(const data::Batch&)> part_listener_;
  std::int64_t averages_ = 0, reports_ = 0;  // of the task before the step
  StepCheck check_;
  KeptBuffers buffers_;
  double lr_ = 0;
};

}  // namespace cohort::train

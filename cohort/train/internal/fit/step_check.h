#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cohort/optim/finite.h"
#include "cohort/optim/late_scalar.h"
#include "cohort/train/metrics.h"
#include "cohort/train/task.h"

namespace cohort::train {

/// A step of which it is known whether its numbers were finite.
struct CheckedStep {
  std::int64_t step = 0;
  StepMetrics metrics = {};
  bool loss_is_finite = true;  ///< of each metric called "loss", where there is one
  bool gradients_are_finite = true;
  bool is_finite() const { return loss_is_finite && gradients_are_finite; }
};

/// Says of each step whether its loss and gradients were finite. Numbers on an accelerator are looked at when
/// the next step has been made, so that checking never waits for the step in flight.
class StepCheck {
 public:
  /// Adds a step. Returns those of which it is known now, oldest first.
  std::vector<CheckedStep> add(std::int64_t step, StepMetrics metrics, const optim::NonFinite& gradients);
  /// Returns the step of which it was not known yet. Blocking: waits for the accelerator.
  std::optional<CheckedStep> take_pending();

 private:
  struct Pending {
    CheckedStep step;
    std::vector<optim::LateScalar> losses = {};  // on an accelerator
    optim::LateScalar gradients = {};            // likewise, or undefined
  };
  std::optional<Pending> pending_;
};

/// "the loss of step 3", or "a gradient of step 3": what was not finite.
std::string subject_of(const CheckedStep& checked);

/// Where in a run a step was.
struct StepPlace {
  std::int64_t epoch = 0;  ///< from 1
  int rank = 0;
  double lr = 0;
  /// The checkpoint that the run was resumed from just before this step; empty: it has made others since.
  std::string resumed_from = {};
};

/// Called before a checkpoint is saved. Throws: NumericError naming the first parameter that is not finite.
void check_parameters(const Task& task, std::int64_t step);

/// Ends a run at a step that was not finite. `batch`: the step's, or null where it is gone.
/// Throws: NumericError naming step and epoch and, where they can be known, rank, module or parameter.
[[noreturn]] void throw_not_finite(const CheckedStep& checked, Task& task, data::Batch* batch,
                                   const StepPlace& place);

}  // namespace cohort::train

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/optim/optimizer.h"

/// Learning rates as pure functions of the number of steps done.
///
/// A schedule has no state: apply it before each step, and a resumed run needs the step count only.
///
///     auto schedule = sequential({linear(0.01, 1.0, 500), cosine(9500)}, {500});
///     for (std::int64_t step = 0; step < 10000; ++step) {
///       schedule->apply(optimizer, step);
///       ...
///     }
///
/// Every schedule equals the chain that torch.optim.lr_scheduler makes of the class of that name, to 1e-12 of
/// the base rate. PyTorch multiplies step upon step; here each value is computed from the start, which agrees
/// better with the formula than the chain does.
namespace cohort::optim {

/// A learning rate, and for some a momentum, as a function of the step alone.
class LRSchedule {
 public:
  virtual ~LRSchedule() = default;
  /// The learning rate of step `step` (from 0), where the group started with `base_lr`.
  virtual double lr(std::int64_t step, double base_lr) const = 0;
  /// The momentum of that step, if the schedule cycles it.
  virtual std::optional<double> momentum(std::int64_t /*step*/) const { return std::nullopt; }
  /// One line, for logs: `cosine(t_max=90, eta_min=0)`.
  virtual std::string describe() const = 0;

  /// lr(step, base_lr).
  /// Throws: UsageError for a negative step, one past the end of a one-cycle, or a rate that is not finite.
  double checked_lr(std::int64_t step, double base_lr) const;
  /// Sets `lr` of every group from its own `initial_lr`, and momentum if the schedule cycles it.
  /// Throws: as checked_lr().
  void apply(Optimizer& optimizer, std::int64_t step) const;
};

/// How schedules are handed on: shared, and never changed.
using LRSchedulePtr = std::shared_ptr<const LRSchedule>;

/// base * factor for `total_iters` steps, base from then on (ConstantLR); by default simply base.
LRSchedulePtr constant(double factor = 1.0, std::int64_t total_iters = 0);
/// base * gamma^(step / step_size) (StepLR).
LRSchedulePtr step_decay(std::int64_t step_size, double gamma = 0.1);
/// base * gamma^(milestones reached); the same milestone twice counts twice (MultiStepLR).
LRSchedulePtr multistep(std::vector<std::int64_t> milestones, double gamma = 0.1);
/// Half a cosine from base to eta_min in `t_max` steps, and back after that (CosineAnnealingLR).
LRSchedulePtr cosine(std::int64_t t_max, double eta_min = 0.0);
/// Straight from base * start_factor to base * end_factor in `total_iters` steps (LinearLR).
LRSchedulePtr linear(double start_factor = 1.0 / 3, double end_factor = 1.0, std::int64_t total_iters = 5);
/// base * gamma^step (ExponentialLR).
LRSchedulePtr exponential(double gamma);
/// base * (1 - step / total_iters)^power, then 0 (PolynomialLR).
LRSchedulePtr polynomial(std::int64_t total_iters, double power = 1.0);
/// base * factor(step) (LambdaLR); `factor` must be a pure function.
LRSchedulePtr lambda(std::function<double(std::int64_t)> factor, std::string description);

/// Options of one_cycle, each as in OneCycleLR.
struct OneCycleOptions {
  std::int64_t total_steps = 0;       ///< must be set
  std::optional<double> max_lr = {};  ///< for all groups; if not set, each group's initial_lr is its peak
  double pct_start = 0.3;             ///< share of the steps in which the rate rises
  bool linear_anneal = false;         ///< false: cosine
  /// Whether momentum goes from max_momentum to base_momentum while the rate rises, and back.
  bool cycle_momentum = true;
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double div_factor = 25.0;       ///< peak / first rate
  double final_div_factor = 1e4;  ///< first rate / last rate
  /// True: down to the first rate in as many steps as the rise took, and then on to the last; false: down to
  /// the last rate in one fall.
  bool three_phase = false;
};
/// Up to the peak and down again, momentum the other way (OneCycleLR).
LRSchedulePtr one_cycle(const OneCycleOptions& options);

/// One schedule after the other: schedules[k] from milestones[k-1] on, counting from 0 there (SequentialLR).
LRSchedulePtr sequential(std::vector<LRSchedulePtr> schedules, std::vector<std::int64_t> milestones);
/// `steps` steps from base * start_factor to base, then `after` from its start.
LRSchedulePtr warmup(std::int64_t steps, double start_factor, LRSchedulePtr after);
/// `inner` counted in epochs: its step is step / steps_per_epoch.
LRSchedulePtr per_epoch(LRSchedulePtr inner, std::int64_t steps_per_epoch);

// All of the above throw UsageError for arguments out of range.

}  // namespace cohort::optim

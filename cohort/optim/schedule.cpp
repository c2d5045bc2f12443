// Most schedules are a factor of the base rate, a function of the step alone; the rest wrap schedules and
// change the step. Nothing is kept between steps: a value follows from the step, without the chain of
// products before it. A sequence finds its part by the milestones, and each part counts from 0.
#include "cohort/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::optim {
namespace {

using base::concat;
using Factor = std::function<double(std::int64_t)>;

void require(bool good, const char* schedule, const std::string& what) {
  if (!good) throw UsageError(concat("optim.", schedule), what);
}

void require_step(std::int64_t step) {
  require(step >= 0, "schedule", concat("got step ", step, ", expected 0 or more"));
}

/// A schedule that multiplies the base rate.
class FactorSchedule : public LRSchedule {
 public:
  FactorSchedule(Factor factor, std::string description)
      : factor_(std::move(factor)), description_(std::move(description)) {}
  double lr(std::int64_t step, double base_lr) const override {
    require_step(step);
    // Each group has its own base rate, so a schedule keeps the ratio of the groups' rates.
    return base_lr * factor_(step);
  }
  std::string describe() const override { return description_; }

 private:
  Factor factor_;
  std::string description_;
};

class CosineSchedule : public LRSchedule {
 public:
  CosineSchedule(std::int64_t t_max, double eta_min) : t_max_(t_max), eta_min_(eta_min) {}
  double lr(std::int64_t step, double base_lr) const override {
    require_step(step);
    const double angle = std::numbers::pi * static_cast<double>(step) / static_cast<double>(t_max_);
    // Loshchilov and Hutter 2017, "SGDR", equation 5. Beyond t_max the rate rises again, as PyTorch's does.
    return eta_min_ + (base_lr - eta_min_) * (1 + std::cos(angle)) / 2;
  }
  std::string describe() const override {
    return concat("cosine(t_max=", t_max_, ", eta_min=", eta_min_, ")");
  }

 private:
  std::int64_t t_max_;
  double eta_min_;
};

class SequentialSchedule : public LRSchedule {
 public:
  SequentialSchedule(std::vector<LRSchedulePtr> schedules, std::vector<std::int64_t> milestones)
      : schedules_(std::move(schedules)), milestones_(std::move(milestones)) {}
  double lr(std::int64_t step, double base_lr) const override {
    const auto [schedule, local] = locate(step);
    return schedule->lr(local, base_lr);
  }
  std::optional<double> momentum(std::int64_t step) const override {
    const auto [schedule, local] = locate(step);
    return schedule->momentum(local);
  }
  std::string describe() const override {
    base::TextList parts;
    parts.add(schedules_[0]->describe());
    for (std::size_t k = 0; k < milestones_.size(); ++k)
      parts.add("from ", milestones_[k], ": ", schedules_[k + 1]->describe());
    return concat("sequential(", parts.text(), ")");
  }

 private:
  std::pair<const LRSchedule*, std::int64_t> locate(std::int64_t step) const {
    require_step(step);
    // The step of a milestone belongs to the part that begins there.
    const auto next = std::upper_bound(milestones_.begin(), milestones_.end(), step);
    const std::int64_t start = next == milestones_.begin() ? 0 : *(next - 1);
    return {schedules_[static_cast<std::size_t>(next - milestones_.begin())].get(), step - start};
  }

  std::vector<LRSchedulePtr> schedules_;
  std::vector<std::int64_t> milestones_;
};

/// Counts epochs instead of steps, by whole division: the rate is constant within an epoch.
class EpochSchedule : public LRSchedule {
 public:
  EpochSchedule(LRSchedulePtr inner, std::int64_t steps) : inner_(std::move(inner)), steps_(steps) {}
  double lr(std::int64_t step, double base_lr) const override {
    require_step(step);
    return inner_->lr(step / steps_, base_lr);
  }
  std::optional<double> momentum(std::int64_t step) const override { return inner_->momentum(step / steps_); }
  std::string describe() const override { return concat(inner_->describe(), " every ", steps_, " steps"); }

 private:
  LRSchedulePtr inner_;
  std::int64_t steps_;
};

LRSchedulePtr factor_schedule(Factor factor, std::string description) {
  return std::make_shared<FactorSchedule>(std::move(factor), std::move(description));
}

void require_positive(std::int64_t value, const char* schedule, const char* name) {
  require(value > 0, schedule, concat(name, " is ", value, ", expected 1 or more"));
}

}  // namespace

double LRSchedule::checked_lr(std::int64_t step, double base_lr) const {
  require_step(step);
  const double rate = lr(step, base_lr);
  if (std::isfinite(rate)) return rate;
  throw UsageError("optim.schedule", concat(describe(), " gives a rate of ", rate, " at step ", step,
                                            " for a group that began with ", base_lr));
}

void LRSchedule::apply(Optimizer& optimizer, std::int64_t step) const {
  // From initial_lr, never from the current rate: to apply a step twice, or to resume at it, changes nothing.
  for (ParamGroup& group : optimizer.param_groups()) group.lr = checked_lr(step, group.initial_lr);
  if (const std::optional<double> value = momentum(step)) optimizer.set_momentum(*value);
}

LRSchedulePtr constant(double factor, std::int64_t total_iters) {
  require(factor >= 0 && factor <= 1, "constant", concat("factor is ", factor, ", expected 0 to 1"));
  require(total_iters >= 0, "constant", concat("total_iters is ", total_iters, ", expected 0 or more"));
  return factor_schedule(
      [=](std::int64_t step) { return step >= total_iters ? 1.0 : factor; },
      total_iters == 0 ? "constant" : concat("constant(factor=", factor, ", total_iters=", total_iters, ")"));
}

LRSchedulePtr step_decay(std::int64_t step_size, double gamma) {
  require_positive(step_size, "step_decay", "step_size");
  // One power in place of a chain of products: resuming at any step gives the same bits as a run that never
  // stopped.
  return factor_schedule(
      [=](std::int64_t step) { return std::pow(gamma, static_cast<double>(step / step_size)); },
      concat("step(step_size=", step_size, ", gamma=", gamma, ")"));
}

LRSchedulePtr multistep(std::vector<std::int64_t> milestones, double gamma) {
  std::string text = concat("multistep(milestones=[", base::join(milestones), "], gamma=", gamma, ")");
  for (std::int64_t milestone : milestones)
    require(milestone >= 0, "multistep", concat("milestone ", milestone, ", expected 0 or more"));
  std::sort(milestones.begin(), milestones.end());
  return factor_schedule(
      [=](std::int64_t step) {
        const auto reached =
            std::upper_bound(milestones.begin(), milestones.end(), step) - milestones.begin();
        return std::pow(gamma, static_cast<double>(reached));
      },
      std::move(text));
}

LRSchedulePtr cosine(std::int64_t t_max, double eta_min) {
  require_positive(t_max, "cosine", "t_max");
  return std::make_shared<CosineSchedule>(t_max, eta_min);
}

LRSchedulePtr linear(double start_factor, double end_factor, std::int64_t total_iters) {
  require(start_factor > 0 && start_factor <= 1, "linear",
          concat("start_factor is ", start_factor, ", expected above 0, at most 1"));
  require(end_factor >= 0 && end_factor <= 1, "linear",
          concat("end_factor is ", end_factor, ", expected 0 to 1"));
  require_positive(total_iters, "linear", "total_iters");
  return factor_schedule(
      [=](std::int64_t step) {
        const auto done = static_cast<double>(std::min(step, total_iters));
        return start_factor + (end_factor - start_factor) * done / static_cast<double>(total_iters);
      },
      concat("linear(start_factor=", start_factor, ", end_factor=", end_factor, ", total_iters=", total_iters,
             ")"));
}

LRSchedulePtr exponential(double gamma) {
  require(gamma > 0, "exponential", concat("gamma is ", gamma, ", expected above 0"));
  return factor_schedule([=](std::int64_t step) { return std::pow(gamma, static_cast<double>(step)); },
                         concat("exponential(gamma=", gamma, ")"));
}

LRSchedulePtr polynomial(std::int64_t total_iters, double power) {
  require_positive(total_iters, "polynomial", "total_iters");
  require(power >= 0, "polynomial", concat("power is ", power, ", expected 0 or more"));
  return factor_schedule(
      [=](std::int64_t step) {
        const auto done = static_cast<double>(std::min(step, total_iters));
        return std::pow(1.0 - done / static_cast<double>(total_iters), power);
      },
      concat("polynomial(total_iters=", total_iters, ", power=", power, ")"));
}

LRSchedulePtr lambda(std::function<double(std::int64_t)> factor, std::string description) {
  require(static_cast<bool>(factor), "lambda", "the function is empty");
  return factor_schedule(std::move(factor), std::move(description));
}

LRSchedulePtr sequential(std::vector<LRSchedulePtr> schedules, std::vector<std::int64_t> milestones) {
  require(!schedules.empty() && milestones.size() + 1 == schedules.size(), "sequential",
          concat("got ", schedules.size(), " schedules and ", milestones.size(),
                 " milestones, expected one schedule more than milestones"));
  require(std::is_sorted(milestones.begin(), milestones.end()) && (milestones.empty() || milestones[0] >= 0),
          "sequential", "milestones must rise, from 0 or more");
  for (const LRSchedulePtr& schedule : schedules)
    require(schedule != nullptr, "sequential", "a schedule is null");
  return std::make_shared<SequentialSchedule>(std::move(schedules), std::move(milestones));
}

LRSchedulePtr warmup(std::int64_t steps, double start_factor, LRSchedulePtr after) {
  // linear() needs a length of at least 1, and a run without a warm-up is no error.
  if (steps == 0) return after;
  return sequential({linear(start_factor, 1.0, steps), std::move(after)}, {steps});
}

LRSchedulePtr per_epoch(LRSchedulePtr inner, std::int64_t steps_per_epoch) {
  require(inner != nullptr, "per_epoch", "the schedule is null");
  require_positive(steps_per_epoch, "per_epoch", "steps_per_epoch");
  return std::make_shared<EpochSchedule>(std::move(inner), steps_per_epoch);
}

}  // namespace cohort::optim

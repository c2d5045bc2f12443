// Options of parameter groups are taken out of a task's optimizers as copies, and restored. So a rate can be
// tried, or a resume can keep the program's options, without any state of an optimizer changing. Lists go by
// the order of the task's optimizers.
#include "cohort/train/internal/fit/rates.h"

#include <algorithm>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"

namespace cohort::train {
namespace {

std::vector<double> initial_rates(const std::vector<ParamGroups>& optimizers) {
  std::vector<double> rates;
  for (const ParamGroups& groups : optimizers) {
    // Rates before schedules: the current ones differ with the step and say nothing of the settings.
    for (const optim::ParamGroup& group : groups) rates.push_back(group.initial_lr);
  }
  return rates;
}

/// The rates without those that repeat the one before: groups mostly share one.
std::string text_of(std::vector<double> rates) {
  rates.erase(std::unique(rates.begin(), rates.end()), rates.end());
  return base::join(rates);
}

}  // namespace

std::vector<ParamGroups> param_groups_of(const Task& task) {
  std::vector<ParamGroups> groups;
  for (const parallel::NamedOptimizer& entry : task.optimizers()) {
    groups.push_back(entry.optimizer->param_groups());
  }
  return groups;
}

void set_param_groups(const Task& task, const std::vector<ParamGroups>& groups) {
  auto next = groups.begin();
  // Parameters are shared tensors, so this copies options only.
  for (const parallel::NamedOptimizer& entry : task.optimizers()) entry.optimizer->param_groups() = *next++;
}

// One number for a report: that of the first group of the first optimizer.
double current_lr(const Task& task) {
  const auto& optimizers = task.optimizers();
  return optimizers.empty() ? 0.0 : optimizers.front().optimizer->param_groups().front().lr;
}

// An optimizer without a schedule keeps the rates that the program gave it.
void apply_schedules(const Task& task, std::int64_t step) {
  for (const parallel::NamedOptimizer& entry : task.optimizers()) {
    if (entry.schedule) entry.schedule->apply(*entry.optimizer, step);
  }
}

double rate_of_step(const Task& task, std::int64_t step) {
  // A schedule may move momentum too, so whole groups are restored.
  const std::vector<ParamGroups> before = param_groups_of(task);
  apply_schedules(task, step);
  const double rate = current_lr(task);
  set_param_groups(task, before);
  return rate;
}

void log_other_rates(const std::vector<ParamGroups>& own, const std::vector<ParamGroups>& saved, bool keeps) {
  const std::vector<double> now = initial_rates(own), then = initial_rates(saved);
  if (now == then) return;
  if (!keeps) {
    base::log_info(
        "learning rates are those of the checkpoint, not the program's "
        "(TrainerOptions::keep_optimizer_options)");
    return;
  }
  base::log_info(base::concat("learning rates before schedules are ", text_of(now), ", not the ",
                              text_of(then), " of the checkpoint"));
}

}  // namespace cohort::train

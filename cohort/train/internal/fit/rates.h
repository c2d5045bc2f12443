#pragma once

#include <cstdint>
#include <vector>

#include "cohort/train/task.h"

/// Options of a task's optimizers, learning rates above all. Internal to this module.
namespace cohort::train {

using ParamGroups = std::vector<optim::ParamGroup>;

/// Return or set the groups of each optimizer.
std::vector<ParamGroups> param_groups_of(const Task& task);
void set_param_groups(const Task& task, const std::vector<ParamGroups>& groups);

/// Returns the rate of the first group; 0 where there is no optimizer.
double current_lr(const Task& task);

/// Sets what the schedules say of `step`.
void apply_schedules(const Task& task, std::int64_t step);

/// Returns the rate of the first group in `step`, and changes nothing.
double rate_of_step(const Task& task, std::int64_t step);

/// Says where the rates before schedules that a program set are not `saved`, the checkpoint's. `keeps`:
/// those of the program count.
void log_other_rates(const std::vector<ParamGroups>& own, const std::vector<ParamGroups>& saved, bool keeps);

}  // namespace cohort::train

#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "cohort/optim/optimizer.h"
#include "cohort/optim/schedule.h"

namespace cohort::parallel {

/// A module, and the name that its task gave it: no two of a task share one.
struct NamedModule {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
};

/// An optimizer, and the schedule of its learning rates.
struct NamedOptimizer {
  std::string name;
  std::shared_ptr<optim::Optimizer> optimizer;
  std::shared_ptr<const optim::LRSchedule> schedule;  ///< may be null: the learning rates stay
};

/// What a task was given to train: saved, restored, and the same on all ranks.
struct TaskParts {
  std::vector<NamedModule> modules;
  std::vector<NamedOptimizer> optimizers;
};

}  // namespace cohort::parallel

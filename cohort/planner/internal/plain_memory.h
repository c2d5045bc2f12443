#pragma once

#include <torch/nn/modules/container/any.h>

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "cohort/optim/optimizer.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/planner/internal/memory_probe.h"
#include "cohort/planner/memory_use.h"
#include "cohort/train/example_step.h"

/// What the plain runner takes, from which a model runner says what it takes. Internal to plan_memory().
namespace cohort::planner {

/// A copy of the model and its optimizer, made for planning alone. `place`: MemoryOptions::place.
struct PlannedModel {
  explicit PlannedModel(const train::ExampleStep& step,
                        const std::map<std::string, base::Placement>& place = {});

  torch::nn::AnyModule any;
  std::shared_ptr<optim::Optimizer> optimizer;
};

/// Virtual ranks of a run, and who computes them.
struct PlannedVirtualRanks {
  parallel::VirtualRankOptions options;
  int num_processes = 1;
  bool is_elastic = false;  ///< any number of processes, up to that of virtual ranks
};

/// What a plan is made from.
struct PlanInputs {
  const train::ExampleStep& step;  ///< must outlive this
  PlannedModel model;
  StepMemory memory;  ///< of the model on one placement
  train::BatchPlan sizes;
  std::optional<PlannedVirtualRanks> virtual_ranks;
  parallel::GradientSyncType gradient_sync;  ///< of a run without virtual ranks
};

/// Returns what the plain runner takes in the run of `plan`. The functions in it share `inputs`: a runner may
/// keep them for the time when its plan is measured.
parallel::PlainMemory plain_memory(const MemoryPlan& plan, const std::shared_ptr<const PlanInputs>& inputs);

}  // namespace cohort::planner

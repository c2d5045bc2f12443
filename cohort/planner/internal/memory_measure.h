#pragma once

#include <map>
#include <memory>
#include <string>

#include "cohort/parallel/model_runner.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/planner/memory_use.h"
#include "cohort/train/example_step.h"

/// What plan_memory() measures. Internal to it.
namespace cohort::planner {

/// What is measured. Ownership: references.
struct MeasureInputs {
  const train::ExampleStep& step;
  const std::map<std::string, base::Placement>& place;  ///< layers that the runner does not place
  const train::BatchPlan& sizes;
  const parallel::RunnerMemory& planned;  ///< whose places are the first of the plan's; with `measured`
  /// That one process computes; null: there are none.
  std::shared_ptr<parallel::VirtualRankSync> virtual_ranks;
};

/// Runs two steps of the whole batch, and writes what they took beside what is planned. Throws: UsageError
/// naming the runner where its MeasuredRun does not fit the places that it planned.
void measure(MemoryPlan& plan, const MeasureInputs& inputs);

}  // namespace cohort::planner

#pragma once

#include <string>

#include "cohort/config/config.h"
#include "cohort/planner/memory_use.h"

/// What a run takes in memory, before it runs: docs/guide/planner.md.
namespace cohort::planner {

/// Says what a run of `config` takes, from two steps with 2 and 4 samples on this CPU; of a pipeline with as
/// many in each micro-batch, twice for each placement.
/// Throws: as make_dataset, make_model and train::make_model_runner; UsageError for placements of several
/// ranks, for `place` with data_parallel or a pipeline, and for `measure` where a placement is no CPU's.
MemoryPlan plan_memory(const config::Config& config, const MemoryOptions& options = {});

/// The tables that `cohort plan --memory` prints, and what `--json` does.
std::string to_text(const MemoryPlan& plan);
/// The plan as one JSON object.
std::string to_json(const MemoryPlan& plan);

}  // namespace cohort::planner

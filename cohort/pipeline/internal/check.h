#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cohort/base/placement.h"
#include "cohort/pipeline/internal/run.h"

/// What a pipeline is made of, checked when it is made. Internal to Pipeline.
namespace cohort::pipeline {

/// Throws: ConfigError naming the stages of a placement that is none.
base::Placement parse_placement(const std::vector<std::string>& placements, std::size_t index,
                                std::size_t num_stages);
/// Throws: UsageError where stages and options do not go together.
void check_options(const std::vector<Stage>& stages, const PipelineOptions& options);
/// A parameter of two stages must be one tensor for both. Throws: UsageError where their devices differ.
void check_tied(const Setup& setup);

}  // namespace cohort::pipeline

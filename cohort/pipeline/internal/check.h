#pragma once

#include <vector>

#include "cohort/pipeline/internal/run.h"

/// What a pipeline is made of, checked when it is made. Internal to Pipeline.
namespace cohort::pipeline {

/// Throws: UsageError where stages and options do not go together.
void check_options(const std::vector<Stage>& stages, const PipelineOptions& options);
/// A placement of this process has one thread. Throws: UsageError where one stands twice; over ranks it may.
void check_distinct(const PipelineOptions& options);
/// A parameter of two stages must be one tensor for both. Throws: UsageError where their devices differ.
void check_tied(const Setup& setup);

}  // namespace cohort::pipeline

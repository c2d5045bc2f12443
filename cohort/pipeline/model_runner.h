#pragma once

#include <vector>

#include "cohort/parallel/model_runner.h"
#include "cohort/pipeline/pipeline.h"

/// A pipeline as a model runner.
namespace cohort::pipeline {

/// What a pipeline is made of.
struct PipelineParts {
  std::vector<Stage> stages;
  PipelineOptions options;
};

/// Returns how a step runs that pipeline; logits and loss are brought to `device`.
parallel::ModelRunner run_pipeline(PipelineParts parts, at::Device device);

}  // namespace cohort::pipeline

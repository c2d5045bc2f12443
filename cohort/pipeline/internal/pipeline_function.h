#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cohort/pipeline/internal/run.h"

/// The place of a pipeline in its caller's graph. Internal to Pipeline.
namespace cohort::pipeline {

/// Returns the batch's outputs, joined, as results of one node, whose backward cuts the gradients that come
/// into micro-batches, lets `backward` run, and hands the inputs' gradients on.
Tensors attach(const Tensors& inputs, const std::shared_ptr<Batch>& batch,
               const std::vector<std::int64_t>& sizes,
               std::function<void(const std::shared_ptr<Batch>&)> backward);

}  // namespace cohort::pipeline

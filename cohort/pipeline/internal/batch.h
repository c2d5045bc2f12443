#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cohort/pipeline/internal/run.h"

/// A batch cut into micro-batches, and put together again. Internal to Pipeline.
namespace cohort::pipeline {

/// How many samples each micro-batch has.
std::vector<std::int64_t> split_sizes(std::int64_t num_samples, const PipelineOptions& options);
/// The same for these, which must have the same length. Throws: UsageError naming the one that has not.
std::vector<std::int64_t> split_sizes(const Tensors& inputs, const Tensors& targets,
                                      const PipelineOptions& options);
std::int64_t num_samples(const std::vector<std::int64_t>& sizes);

/// Returns views, by micro-batch. `counts`: what they count their changes by, as stages may write to them.
std::vector<Tensors> split(const Tensors& tensors, const std::vector<std::int64_t>& sizes,
                           std::vector<autograd::ScopedVersionCounter>* counts = nullptr);
/// Returns each tensor of all micro-batches in one; undefined where it is undefined in all.
Tensors join(const std::vector<Tensors>& parts);
/// The same for gradients, of these inputs: what came for some micro-batches alone is zero for the others.
Tensors join_gradients(const std::vector<Tensors>& parts, const Tensors& inputs,
                       const std::vector<std::int64_t>& sizes);
/// Sends the inputs' gradients on into the caller's graph.
void hand_back(const Tensors& inputs, const Tensors& gradients);

std::shared_ptr<Batch> make_batch(const Setup& setup, const Tensors& inputs,
                                  const std::vector<std::int64_t>& sizes);
/// Tells the tensors that a batch was cut from what was changed of them, once all forwards have run.
void publish_versions(Batch& batch);

}  // namespace cohort::pipeline

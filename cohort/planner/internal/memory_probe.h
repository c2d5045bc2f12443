#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/train/internal/model_runners.h"

/// What a step takes in memory at any batch size, from steps of a few samples.
namespace cohort::planner {

/// Bytes as a function of the samples in a batch: a straight line through what two batches took.
struct MemoryLine {
  double fixed = 0;
  double per_sample = 0;
  std::int64_t at(std::int64_t samples) const;
};

/// What one forward and backward hold besides the model and the batch.
struct StepMemory {
  /// What the forward keeps for backward, by leaf layer ("layer1.0.conv1"), in the order of its run; the last
  /// one, without a name, is what came after the last layer, such as the loss. A model that does not report
  /// its layers (models/observer.h) has this one only, a placement of a pipeline none.
  std::vector<std::pair<std::string, MemoryLine>> layers;
  /// What there was besides parameters' gradients after the forward; after each one of a pipeline's
  /// placement.
  std::vector<MemoryLine> held;
  /// Live bytes after each block that was given out or taken back: forward, then backward.
  std::vector<MemoryLine> curve;

  /// The most that was held.
  std::int64_t activations(std::int64_t samples) const;
  /// The most at any time, the gradients made by then included.
  std::int64_t peak(std::int64_t samples) const;
};

/// Runs `loss_of(input_of(n))` forward and backward for two small n, and returns what it takes at any n:
/// exact where each block is a fixed number of bytes and one per sample, and LibTorch picks the same kernels.
/// n is 2 and 4, or 4 and 8 where 2 samples took other kernels than 4 (see the source, Note [Two probes of
/// the same kernels]); where these differ too, only their peaks are drawn out. The module's gradients are
/// gone afterwards; its buffers, and LibTorch's generator, have moved on. Threads: as AllocationProfiler.
StepMemory probe_step(const torch::nn::Module& module,
                      const std::function<at::Tensor(const at::Tensor& input)>& loss_of,
                      const std::function<at::Tensor(std::int64_t samples)>& input_of);

/// The same for each placement of a pipeline, on `step(call, n)`, which is to be a step of n samples: what
/// its thread asked for, in a step in which that placement is ahead (pipeline::PipelineOptions::run_ahead).
/// So nothing is missing that is under way between two stages, whoever is faster. The last is the calling
/// thread's: what `step` made there, such as the batch, and losses that are added up. With `again` it is a
/// step whose gradients are added to those of one before, which do not count. For `samples` or numbers that
/// leave the same rest when cut into micro-batches. GPUs' placements run on the CPU.
std::vector<StepMemory> probe_pipeline(
    const train::PipelineParts& parts,
    const std::function<void(const parallel::ModelRunner& call, std::int64_t samples)>& step,
    std::int64_t samples, bool again);

/// Bytes of the gradients that the parameters of a placement's stages have.
std::int64_t gradient_bytes(const train::PipelineParts& parts, int placement);

}  // namespace cohort::planner

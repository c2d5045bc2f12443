#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>

#include "cohort/memory/step_memory.h"

/// What a step of the plain model takes in memory at any batch size.
namespace cohort::planner {

using memory::StepMemory;

/// Runs `loss_of(input_of(n))` forward and backward for two small n, and returns what it takes at any n:
/// exact where each block is a fixed number of bytes and one per sample, and LibTorch picks the same kernels.
/// n is as memory::probe_twice() picks it; where kernels differ there too, only their peaks are drawn out.
/// The module's gradients are gone afterwards; its buffers, and LibTorch's generator, have moved on. Threads:
/// as AllocationProfiler.
StepMemory probe_step(const torch::nn::Module& module,
                      const std::function<at::Tensor(const at::Tensor& input)>& loss_of,
                      const std::function<at::Tensor(std::int64_t samples)>& input_of);

}  // namespace cohort::planner

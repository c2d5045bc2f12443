#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/comm/group.h"
#include "cohort/parallel/step_info.h"

/// Averages gradients over ranks after backward: docs/guide/parallel.md.
namespace cohort::parallel {

/// How gradients travel together.
struct AverageOptions {
  /// Most of one all-reduce; a gradient that is larger goes alone.
  std::int64_t chunk_bytes = std::int64_t{25} << 20;
  /// Of each collective; 0 is the group's.
  std::chrono::milliseconds timeout{0};
};

/// Makes every rank's gradients the weighted mean over ranks, in flat chunks, after backward.
/// Shapes: a chunk is a flat [n], n = sum of numel, one dtype and device.
/// Collective: every rank calls in the same order; blocks until the last chunk is reduced.
/// Ownership: shares the group; keeps flat buffers of the gradients' size. Threads: one caller at a time.
/// Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.1 (the naive solution).
class GradientAverager {
 public:
  explicit GradientAverager(comm::Group group, AverageOptions options = {});

  /// Gives parameters and buffers the values of rank 0's. Collective.
  /// Throws: UsageError naming the first name, shape or type in which a rank differs from rank 0.
  void broadcast(const torch::nn::Module& module);
  /// The same for buffers alone, such as the running statistics of batch norm.
  void broadcast_buffers(const torch::nn::Module& module);

  /// Replaces each gradient by sum_r(weight_r g_r) / sum_r(weight_r); one that only other ranks have counts
  /// as zeros here and is made. `weight`: samples that this rank's mean loss was taken over, may be 0.
  /// Where `finite` is false on any rank, gradients are left as they are and the report says so.
  /// Throws: UsageError for a sparse gradient, or a weight that is negative or not finite; what Group throws.
  AverageReport average(std::span<const at::Tensor> parameters, double weight, bool finite = true);

  /// The ranks that it averages over.
  const comm::Group& group() const { return group_; }

 private:
  struct Chunk;
  void reduce_chunks(std::vector<Chunk>& chunks, double scale);

  comm::Group group_;
  AverageOptions options_;
  std::map<std::string, at::Tensor> buffers_;  // flat, by dtype, device and place
};

}  // namespace cohort::parallel

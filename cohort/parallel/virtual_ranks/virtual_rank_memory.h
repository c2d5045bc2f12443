#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cohort/parallel/task_parts.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"

namespace cohort::parallel {

/// Bytes that VirtualRankSync keeps between steps. Of the sums one is where gradients lie after average().
struct VirtualRankMemory {
  std::int64_t sums = 0;      ///< partial sums, at most log2(V) + 1, each as large as the gradients
  std::int64_t exchange = 0;  ///< covers on their way to other processes, and those of others
  std::int64_t buffers = 0;   ///< copies of buffers such as running statistics, and numbers of a step
  std::int64_t total() const { return sums + exchange + buffers; }
};

/// Returns what process `process` of `num_processes` keeps for an optimizer with these parameters. Makes
/// nothing. Throws: UsageError for more processes than virtual ranks.
VirtualRankMemory plan_virtual_ranks(const std::vector<at::Tensor>& parameters,
                                     const std::vector<NamedModule>& modules,
                                     const VirtualRankOptions& options, int process, int num_processes);

}  // namespace cohort::parallel

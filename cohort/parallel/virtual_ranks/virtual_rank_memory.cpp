#include "cohort/parallel/virtual_ranks/virtual_rank_memory.h"

#include "cohort/base/error.h"
#include "cohort/parallel/virtual_ranks/internal/flat_gradients.h"
#include "cohort/parallel/virtual_ranks/internal/share_buffers.h"
#include "cohort/parallel/virtual_ranks/internal/tree_reducer.h"

namespace cohort::parallel {

VirtualRankMemory plan_virtual_ranks(const std::vector<at::Tensor>& parameters,
                                     const std::vector<NamedModule>& modules,
                                     const VirtualRankOptions& options, int process, int num_processes) {
  const std::int64_t v = options.num_virtual_ranks;
  if (num_processes < 1 || num_processes > v) {
    throw UsageError("parallel.virtual_ranks",
                     base::concat("memory of ", num_processes, " processes and ", v,
                                  " virtual ranks, expected 1 to ", v, " processes"));
  }
  std::vector<at::Tensor> added;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.requires_grad() && parameter.numel() > 0) added.push_back(parameter);
  }
  const FlatGradients gradients(added, options.bucket_bytes, v, nullptr);
  const TreeBlocks blocks(v, process, num_processes);
  const auto slots = static_cast<std::int64_t>(stack_size(blocks.leaf_merges));
  VirtualRankMemory memory;
  for (std::size_t bucket = 0; bucket < gradients.num_buckets(); ++bucket) {
    memory.sums += slots * gradients.slot_bytes(bucket);
    if (num_processes == 1) continue;
    const std::int64_t row = blocks.slice_numel(gradients.numel(bucket)) * gradients.sum_itemsize(bucket);
    const std::int64_t nodes = blocks.cover_sizes[static_cast<std::size_t>(process)];
    if (nodes > 1) memory.exchange += num_processes * nodes * row;
    memory.exchange += blocks.num_received_rows() * row;
  }
  // A flag for each parameter, and those of all processes.
  if (num_processes > 1) memory.exchange += std::ssize(added) * (1 + num_processes);
  // The header of a step, and those of all processes.
  const std::int64_t header = (1 + v) * static_cast<std::int64_t>(sizeof(double));
  memory.buffers = ShareBuffers::bytes_of(modules) + header * (num_processes > 1 ? 1 + num_processes : 1);
  return memory;
}

}  // namespace cohort::parallel

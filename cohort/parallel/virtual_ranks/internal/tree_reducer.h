#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cohort/parallel/virtual_ranks/internal/flat_gradients.h"
#include "cohort/parallel/virtual_ranks/internal/reduction_tree.h"
#include "cohort/parallel/virtual_ranks/slice_exchange.h"

namespace cohort::parallel {

/// What a process has of the tree.
struct TreeBlocks {
  TreeBlocks() = default;
  TreeBlocks(std::int64_t num_leaves, int rank, int size);

  /// A process adds up one slice of a bucket.
  std::int64_t slice_numel(std::int64_t numel) const { return (numel + size - 1) / size; }
  /// The first and the last process leave out their own piece, where what is left lies in one.
  bool keeps_own_piece() const { return rank == 0 || rank == size - 1; }
  std::int64_t num_nodes(int process) const { return cover_sizes[static_cast<std::size_t>(process)]; }
  std::int64_t num_received_rows() const { return num_rows - (keeps_own_piece() ? num_nodes(rank) : 0); }

  int rank = -1, size = 0;
  std::vector<std::int64_t> leaf_merges, row_merges;
  std::vector<std::int64_t> cover_sizes;  ///< of each process
  std::int64_t num_rows = 0;              ///< nodes of all covers
};

/// Adds the gradients of some parameters over all virtual ranks, in the order of the tree. Internal to
/// VirtualRankSync.
class TreeReducer {
 public:
  TreeReducer(std::vector<at::Tensor> parameters, std::int64_t num_leaves, std::int64_t bucket_bytes);
  TreeReducer(const TreeReducer&) = delete;
  TreeReducer& operator=(const TreeReducer&) = delete;
  ~TreeReducer();

  const FlatGradients& gradients() const { return gradients_; }

  /// Begins a step: this process adds the leaves of the `exchange`'s block for it. `exchange` may be null:
  /// all leaves. Gradients of before are dropped. It must outlive the step.
  void begin(SliceExchange* exchange);
  /// Takes the gradients as the next leaf, times `weight`. The parameters have none afterwards.
  void add_leaf(double weight);
  /// Before the last backward of the block's last leaf: buckets are sent while it runs, each when its
  /// gradients have come. `may_send` returns the sum of all weights, or 0 where nothing may be sent. Does
  /// nothing where other leaves follow, or where gradients are not on the CPU.
  void send_early(double weight, std::function<double()> may_send);
  /// The step will not be finished: parameters have no gradient, and nobody waits for what was sent.
  void abandon();
  /// Sums of further steps lie in other memory.
  void release_memory();
  /// After all leaves of the block: sends what is left. `weight`: the sum of all weights. Collective.
  void send(double weight);
  /// After send(): makes the gradients the sum over all leaves divided by `weight`.
  /// Collective. Returns bytes of the gradients.
  std::int64_t finish(double weight);

 private:
  struct Hooks;
  void on_gradient(std::size_t parameter);
  void fold(std::size_t bucket, double weight);
  std::int64_t slice_numel(std::size_t bucket) const { return blocks_.slice_numel(gradients_.numel(bucket)); }
  SliceExchange::Transfer share_flags(at::Tensor& all);
  void send_cover(std::size_t bucket);
  std::vector<at::Tensor> rows_of(std::size_t bucket);
  void send_next(double weight);
  void add_rows(std::size_t bucket, double weight);
  at::Tensor allocate(std::int64_t numel, const at::TensorOptions& options) const;
  at::Tensor& reused(std::vector<at::Tensor>& tensors, std::size_t bucket, std::int64_t numel);

  const std::int64_t num_leaves_;
  FlatGradients gradients_;
  std::vector<std::uint8_t> flags_;  // of each parameter: a leaf had a gradient

  SliceExchange* exchange_ = nullptr;  // null: one process
  TreeBlocks blocks_;

  std::size_t next_leaf_ = 0, stack_ = 0;
  std::vector<at::Tensor> packed_, received_;  // by bucket; memory that is used again
  std::vector<SliceExchange::Transfer> transfers_;
  at::Tensor own_flags_, all_flags_;
  SliceExchange::Transfer flags_arrived_;

  // Of the last leaf, from send_early() to add_leaf().
  std::function<double()> may_send_;  // null: gradients are not waited for
  double early_weight_ = 0;
  std::size_t num_sent_ = 0;            // buckets
  std::vector<std::size_t> missing_;    // gradients of each bucket
  std::vector<std::uint8_t> arrivals_;  // of each parameter
  bool is_measured_ = false, comes_once_ = true;
  std::unique_ptr<Hooks> hooks_;
};

}  // namespace cohort::parallel

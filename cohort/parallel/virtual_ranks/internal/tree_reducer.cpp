// A process folds its leaves to its cover, in slots of FlatGradients. Then process k gets slice k of every
// cover, a row for each node, adds the rows in the tree's order, divides by the samples, and sends the slice to
// all. Additions are element by element, so slices, buckets and threads change no bit; the order of additions
// is the tree's alone. A cover of one node is sent from where it lies. Each process may have gradients of other
// parameters, so they exchange a flag for each parameter.
#include "cohort/parallel/virtual_ranks/internal/tree_reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::parallel {
namespace {

at::Tensor bytes_of(const at::Tensor& flat) {
  return flat.view(at::kByte);
}

}  // namespace

TreeReducer::TreeReducer(std::vector<at::Tensor> parameters, std::int64_t num_leaves,
                         std::int64_t bucket_bytes)
    : num_leaves_(num_leaves),
      // At most as many processes as leaves: so many equal slices fit.
      gradients_(
          std::move(parameters), bucket_bytes, num_leaves,
          [this](std::int64_t numel, const at::TensorOptions& options) { return allocate(numel, options); }),
      flags_(gradients_.parameters().size(), 0) {}

// Blocks may be others than in the step before.
void TreeReducer::set_blocks(int rank, int size) {
  if (rank == rank_ && size == size_) return;
  rank_ = rank;
  size_ = size;
  cover_sizes_.clear();
  std::vector<LeafRange> rows, leaves;
  for (int process = 0; process < size; ++process) {
    const std::vector<LeafRange> cover = cover_of(num_leaves_, block_of(process, size, num_leaves_));
    cover_sizes_.push_back(std::ssize(cover));
    rows.insert(rows.end(), cover.begin(), cover.end());
  }
  const LeafRange block = block_of(rank, size, num_leaves_);
  for (std::int64_t leaf = block.begin; leaf < block.end; ++leaf) leaves.push_back({leaf, leaf + 1});
  leaf_merges_ = merges_after(num_leaves_, leaves);
  row_merges_ = merges_after(num_leaves_, rows);
  num_rows_ = std::ssize(rows);
}

void TreeReducer::begin(SliceExchange* exchange) {
  exchange_ = exchange != nullptr && exchange->size() > 1 ? exchange : nullptr;
  set_blocks(exchange_ == nullptr ? 0 : exchange_->rank(), exchange_ == nullptr ? 1 : exchange_->size());
  next_leaf_ = stack_ = 0;
  std::ranges::fill(flags_, 0);
  // Not zeroed in place: 0 + -0 is another number than -0.
  gradients_.clear_gradients();
}

void TreeReducer::add_leaf(double weight) {
  gradients_.write_leaf(stack_++, weight, flags_);
  gradients_.clear_gradients();
  for (std::int64_t merge = 0; merge < leaf_merges_[next_leaf_]; ++merge, --stack_) {
    gradients_.add_next(stack_ - 2);
  }
  ++next_leaf_;
}

std::int64_t TreeReducer::slice_numel(std::size_t bucket) const {
  return (gradients_.numel(bucket) + size_ - 1) / size_;
}

at::Tensor TreeReducer::allocate(std::int64_t numel, const at::TensorOptions& options) const {
  return exchange_ == nullptr ? at::empty({numel}, options) : exchange_->empty(numel, options);
}

at::Tensor& TreeReducer::reused(std::vector<at::Tensor>& tensors, std::size_t bucket, std::int64_t numel) {
  tensors.resize(gradients_.num_buckets());
  at::Tensor& tensor = tensors[bucket];
  if (!tensor.defined() || tensor.numel() != numel) {
    tensor = allocate(numel, gradients_.flat(bucket, 0).options());
  }
  return tensor;
}

SliceExchange::Transfer TreeReducer::share_flags(at::Tensor& all) {
  const auto count = static_cast<std::int64_t>(flags_.size());
  if (!own_flags_.defined()) own_flags_ = at::empty({count}, at::kByte);
  if (!all.defined() || all.numel() != count * size_) all = at::empty({count * size_}, at::kByte);
  std::memcpy(own_flags_.mutable_data_ptr(), flags_.data(), flags_.size());
  return exchange_->all_gather(all, own_flags_);
}

// Piece k of what is sent: slice k of each node of the cover.
void TreeReducer::send_cover(std::size_t bucket) {
  const std::int64_t slice = slice_numel(bucket), nodes = cover_sizes_[static_cast<std::size_t>(rank_)];
  at::Tensor sent = gradients_.flat(bucket, 0).narrow(0, 0, size_ * slice);
  if (nodes > 1) {
    const at::Tensor packed = reused(packed_, bucket, size_ * nodes * slice);
    for (std::int64_t node = 0; node < nodes; ++node) {
      const at::Tensor& sum = gradients_.flat(bucket, static_cast<std::size_t>(node));
      packed.view({size_, nodes, slice})
          .select(1, node)
          .copy_(sum.narrow(0, 0, size_ * slice).view({size_, slice}));
    }
    sent = packed;
  }
  const at::Tensor& received = reused(received_, bucket, num_rows_ * slice);
  const std::int64_t row_bytes = slice * static_cast<std::int64_t>(received.element_size());
  const std::vector<std::int64_t> sizes_out(static_cast<std::size_t>(size_), nodes * row_bytes);
  std::vector<std::int64_t> sizes_in;
  for (const std::int64_t count : cover_sizes_) sizes_in.push_back(count * row_bytes);
  transfers_.push_back(exchange_->all_to_all(bytes_of(received), bytes_of(sent), sizes_in, sizes_out));
}

// The sum of the rows comes to the first row.
void TreeReducer::add_rows(std::size_t bucket, double weight) {
  const std::int64_t slice = slice_numel(bucket);
  const at::Tensor rows = received_[bucket].view({num_rows_, slice});
  std::vector<std::int64_t> stack;
  for (std::int64_t row = 0; row < num_rows_; ++row) {
    stack.push_back(row);
    for (std::int64_t merge = 0; merge < row_merges_[static_cast<std::size_t>(row)]; ++merge) {
      const at::Tensor upper = rows[stack.back()];
      stack.pop_back();
      rows[stack.back()].add_(upper);
    }
  }
  rows[0].div_(weight);
  transfers_[bucket] = exchange_->all_gather(bytes_of(gradients_.flat(bucket, 0).narrow(0, 0, size_ * slice)),
                                             bytes_of(rows[0]));
}

std::int64_t TreeReducer::finish(double weight) {
  const at::NoGradGuard no_grad;
  const std::size_t count = gradients_.num_buckets();
  if (exchange_ == nullptr) {
    for (std::size_t bucket = 0; bucket < count; ++bucket) {
      at::Tensor sum = gradients_.flat(bucket, 0).narrow(0, 0, gradients_.numel(bucket));
      sum.div_(weight);
    }
    gradients_.set_gradients(flags_);
    return gradients_.bytes();
  }
  // All buckets are on their way before the first one is waited for.
  transfers_.clear();
  for (std::size_t bucket = 0; bucket < count; ++bucket) send_cover(bucket);
  const SliceExchange::Transfer flags_arrived = share_flags(all_flags_);
  for (std::size_t bucket = 0; bucket < count; ++bucket) {
    transfers_[bucket]();
    add_rows(bucket, weight);
  }
  flags_arrived();
  const auto* const all = all_flags_.const_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < flags_.size() * static_cast<std::size_t>(size_); ++i) {
    if (all[i] != 0) flags_[i % flags_.size()] = 1;
  }
  for (const SliceExchange::Transfer& arrived : transfers_) arrived();
  transfers_.clear();
  gradients_.set_gradients(flags_);
  return gradients_.bytes();
}

}  // namespace cohort::parallel

// A process folds its leaves to its cover, in slots of FlatGradients. Then process k gets slice k of every
// cover, a row for each node, adds the rows in the tree's order, divides by the samples, and sends the slice
// to all. Additions are element by element, so slices, buckets and threads change no bit; the order of
// additions is the tree's alone. A cover of one node is sent from where it lies. Each process may have
// gradients of other parameters, so they exchange a flag for each parameter.
#include "cohort/parallel/virtual_ranks/internal/tree_reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::parallel {
namespace {

// As a number of C++, which does not change the type of what it divides.
at::Tensor divisor_of(double weight) {
  at::Tensor divisor = at::scalar_tensor(weight, at::kDouble);
  divisor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return divisor;
}

at::Tensor bytes_of(const at::Tensor& flat) {
  return flat.view(at::kByte);
}

}  // namespace

/// Post hooks of the nodes that write gradients, while it lives.
struct TreeReducer::Hooks {
  using NodePtr = decltype(torch::autograd::Edge::function);

  Hooks(const std::vector<at::Tensor>& parameters, const std::function<void(std::size_t)>& on_gradient) {
    using torch::autograd::variable_list;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      NodePtr accumulator = torch::autograd::impl::grad_accumulator(parameters[i]);
      const std::uintptr_t key =
          accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
              [on_gradient, i](const variable_list& outputs, const variable_list& /*inputs*/) {
                on_gradient(i);
                return outputs;
              }));
      hooks.emplace_back(std::move(accumulator), key);
    }
  }
  ~Hooks() {
    for (const auto& [accumulator, key] : hooks) accumulator->del_post_hook(key);
  }
  Hooks(const Hooks&) = delete;
  Hooks& operator=(const Hooks&) = delete;

  std::vector<std::pair<NodePtr, std::uintptr_t>> hooks;
};

TreeReducer::TreeReducer(std::vector<at::Tensor> parameters, std::int64_t num_leaves,
                         std::int64_t bucket_bytes)
    : num_leaves_(num_leaves),
      // At most as many processes as leaves: so many equal slices fit.
      gradients_(
          std::move(parameters), bucket_bytes, num_leaves,
          [this](std::int64_t numel, const at::TensorOptions& options) { return allocate(numel, options); }),
      flags_(gradients_.parameters().size(), 0),
      hooks_(std::make_unique<Hooks>(gradients_.parameters(), [this](std::size_t parameter) {
        if (may_send_) on_gradient(parameter);
      })) {}

TreeReducer::~TreeReducer() = default;

TreeBlocks::TreeBlocks(std::int64_t num_leaves, int rank, int size) : rank(rank), size(size) {
  std::vector<LeafRange> rows, leaves;
  for (int process = 0; process < size; ++process) {
    const std::vector<LeafRange> cover = cover_of(num_leaves, block_of(process, size, num_leaves));
    cover_sizes.push_back(std::ssize(cover));
    rows.insert(rows.end(), cover.begin(), cover.end());
  }
  const LeafRange block = block_of(rank, size, num_leaves);
  for (std::int64_t leaf = block.begin; leaf < block.end; ++leaf) leaves.push_back({leaf, leaf + 1});
  leaf_merges = merges_after(num_leaves, leaves);
  row_merges = merges_after(num_leaves, rows);
  num_rows = std::ssize(rows);
}

void TreeReducer::begin(SliceExchange* exchange) {
  exchange_ = exchange != nullptr && exchange->size() > 1 ? exchange : nullptr;
  const int rank = exchange_ == nullptr ? 0 : exchange_->rank();
  const int size = exchange_ == nullptr ? 1 : exchange_->size();
  // Blocks may be others than in the step before.
  if (rank != blocks_.rank || size != blocks_.size) blocks_ = TreeBlocks(num_leaves_, rank, size);
  next_leaf_ = stack_ = num_sent_ = 0;
  may_send_ = nullptr;
  transfers_.clear();
  std::ranges::fill(flags_, 0);
  // Not zeroed in place: 0 + -0 is another number than -0.
  gradients_.clear_gradients();
}

void TreeReducer::abandon() {
  may_send_ = nullptr;
  transfers_.clear();
  flags_arrived_ = nullptr;
  gradients_.clear_gradients();
}

void TreeReducer::release_memory() {
  gradients_.release_memory();
  packed_.clear();
  received_.clear();
  own_flags_ = at::Tensor();
  all_flags_ = at::Tensor();
}

// The next leaf of a bucket, and the sums that it completes.
void TreeReducer::fold(std::size_t bucket, double weight) {
  gradients_.take_leaf(bucket, stack_, weight, flags_);
  for (std::int64_t merge = 0; merge < blocks_.leaf_merges[next_leaf_]; ++merge) {
    gradients_.add_next(bucket, stack_ - 1 - static_cast<std::size_t>(merge));
  }
}

void TreeReducer::add_leaf(double weight) {
  if (std::exchange(may_send_, nullptr) && !is_measured_) {
    is_measured_ = true;
    comes_once_ = std::ranges::none_of(arrivals_, [](std::uint8_t times) { return times > 1; });
  }
  for (std::size_t bucket = num_sent_; bucket < gradients_.num_buckets(); ++bucket) fold(bucket, weight);
  stack_ = stack_ + 1 - static_cast<std::size_t>(blocks_.leaf_merges[next_leaf_]);
  ++next_leaf_;
}

void TreeReducer::send_early(double weight, std::function<double()> may_send) {
  const bool is_last = next_leaf_ + 1 == blocks_.leaf_merges.size();
  const auto is_on_cpu = [](const at::Tensor& parameter) { return parameter.is_cpu(); };
  if (!is_last || exchange_ == nullptr || !std::ranges::all_of(gradients_.parameters(), is_on_cpu)) return;
  early_weight_ = weight;
  may_send_ = std::move(may_send);
  missing_.clear();
  for (std::size_t bucket = 0; bucket < gradients_.num_buckets(); ++bucket) {
    missing_.push_back(gradients_.num_parameters(bucket));
  }
  arrivals_.assign(gradients_.parameters().size(), 0);
}

// Note [Gradients that come twice]
// A parameter in a recomputed part gets its gradient in several pieces. The first backward only counts. Where
// each gradient came once, later backwards send a bucket as soon as each of its gradients has come.
void TreeReducer::on_gradient(std::size_t parameter) {
  const std::size_t bucket = gradients_.bucket_of(parameter);
  if (++arrivals_[parameter] > 1) {
    if (bucket >= num_sent_) return;
    throw UsageError("parallel.virtual_ranks",
                     "a gradient came twice in one backward, and once in the first: the first piece was sent",
                     "prepare_average() before the last backward of a step alone");
  }
  const at::NoGradGuard no_grad;
  --missing_[bucket];
  if (!is_measured_ || !comes_once_) return;
  while (num_sent_ < missing_.size() && missing_[num_sent_] == 0) {
    const double weight = may_send_();
    if (weight == 0) return;
    fold(num_sent_, early_weight_);
    send_next(weight);
  }
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
  if (!all.defined() || all.numel() != count * blocks_.size)
    all = at::empty({count * blocks_.size}, at::kByte);
  std::memcpy(own_flags_.mutable_data_ptr(), flags_.data(), flags_.size());
  return exchange_->all_gather(all, own_flags_);
}

// Piece k of what is sent: slice k of each node of the cover.
void TreeReducer::send_cover(std::size_t bucket) {
  const std::int64_t slice = slice_numel(bucket), nodes = blocks_.num_nodes(blocks_.rank);
  at::Tensor sent = gradients_.flat(bucket, 0).narrow(0, 0, blocks_.size * slice);
  if (nodes > 1) {
    const at::Tensor packed = reused(packed_, bucket, blocks_.size * nodes * slice);
    for (std::int64_t node = 0; node < nodes; ++node) {
      const at::Tensor& sum = gradients_.flat(bucket, static_cast<std::size_t>(node));
      packed.view({blocks_.size, nodes, slice})
          .select(1, node)
          .copy_(sum.narrow(0, 0, blocks_.size * slice).view({blocks_.size, slice}));
    }
    sent = packed;
  }
  const bool keeps_own = blocks_.keeps_own_piece();
  if (keeps_own)
    sent = sent.narrow(0, blocks_.rank == 0 ? nodes * slice : 0, (blocks_.size - 1) * nodes * slice);
  const at::Tensor& received = reused(received_, bucket, blocks_.num_received_rows() * slice);
  const std::int64_t row_bytes = slice * static_cast<std::int64_t>(received.element_size());
  std::vector<std::int64_t> sizes_out, sizes_in;
  for (int process = 0; process < blocks_.size; ++process) {
    const bool is_kept = keeps_own && process == blocks_.rank;
    sizes_out.push_back(is_kept ? 0 : nodes * row_bytes);
    sizes_in.push_back(is_kept ? 0 : blocks_.num_nodes(process) * row_bytes);
  }
  transfers_.push_back(exchange_->all_to_all(bytes_of(received), bytes_of(sent), sizes_in, sizes_out));
}

// The slices of this process, of all nodes in their order: [slice] each.
std::vector<at::Tensor> TreeReducer::rows_of(std::size_t bucket) {
  const std::int64_t slice = slice_numel(bucket);
  std::vector<at::Tensor> rows;
  std::int64_t begin = 0;
  for (int process = 0; process < blocks_.size; ++process) {
    for (std::int64_t node = 0; node < blocks_.num_nodes(process); ++node) {
      if (blocks_.keeps_own_piece() && process == blocks_.rank) {
        rows.push_back(
            gradients_.flat(bucket, static_cast<std::size_t>(node)).narrow(0, blocks_.rank * slice, slice));
      } else {
        rows.push_back(received_[bucket].narrow(0, begin, slice));
        begin += slice;
      }
    }
  }
  return rows;
}

// In pieces that stay in the cache from the first addition to the division.
void TreeReducer::add_rows(std::size_t bucket, double weight) {
  transfers_[bucket]();
  constexpr std::int64_t kPiece = 1 << 15;
  const std::int64_t slice = slice_numel(bucket);
  const std::vector<at::Tensor> rows = rows_of(bucket);
  const at::Tensor sum = gradients_.flat(bucket, 0).narrow(0, blocks_.rank * slice, slice);
  std::vector<std::size_t> stack;
  for (std::int64_t begin = 0; begin < slice; begin += kPiece) {
    const std::int64_t numel = std::min(kPiece, slice - begin);
    stack.clear();
    for (std::size_t row = 0; row < rows.size(); ++row) {
      stack.push_back(row);
      for (std::int64_t merge = 0; merge < blocks_.row_merges[row]; ++merge) {
        const at::Tensor upper = rows[stack.back()].narrow(0, begin, numel);
        stack.pop_back();
        rows[stack.back()].narrow(0, begin, numel).add_(upper);
      }
    }
    at::Tensor out = sum.narrow(0, begin, numel);
    at::div_out(out, rows.front().narrow(0, begin, numel), divisor_of(weight));
  }
  // From its own place in the output, which no transport copies.
  transfers_[bucket] = exchange_->all_gather(
      bytes_of(gradients_.flat(bucket, 0).narrow(0, 0, blocks_.size * slice)), bytes_of(sum));
}

// The sum of a bucket is made when the next bucket is on its way. This order of transfers is that of every
// process, whatever of it is done while backward runs.
void TreeReducer::send_next(double weight) {
  send_cover(num_sent_++);
  if (num_sent_ > 1) add_rows(num_sent_ - 2, weight);
}

void TreeReducer::send(double weight) {
  if (exchange_ == nullptr) return;
  const at::NoGradGuard no_grad;
  while (num_sent_ < gradients_.num_buckets()) send_next(weight);
  flags_arrived_ = share_flags(all_flags_);
}

std::int64_t TreeReducer::finish(double weight) {
  const at::NoGradGuard no_grad;
  const std::size_t count = gradients_.num_buckets();
  if (exchange_ == nullptr) {
    for (std::size_t bucket = 0; bucket < count; ++bucket) {
      at::Tensor sum = gradients_.flat(bucket, 0).narrow(0, 0, gradients_.numel(bucket));
      sum.div_(divisor_of(weight));
    }
    gradients_.set_gradients(flags_);
    return gradients_.bytes();
  }
  if (count > 0) add_rows(count - 1, weight);
  flags_arrived_();
  const auto* const all = all_flags_.const_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < flags_.size() * static_cast<std::size_t>(blocks_.size); ++i) {
    if (all[i] != 0) flags_[i % flags_.size()] = 1;
  }
  for (const SliceExchange::Transfer& arrived : transfers_) arrived();
  transfers_.clear();
  gradients_.set_gradients(flags_);
  return gradients_.bytes();
}

}  // namespace cohort::parallel

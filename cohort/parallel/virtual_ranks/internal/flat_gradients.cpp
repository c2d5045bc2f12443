// A bucket is one flat tensor in which each gradient has a view, strided as its parameter. A leaf is
// written by one multiplication per gradient, sums are additions of whole buckets. Buckets are filled in
// the order in which backward makes gradients, so the first can travel early. Always: sizes follow from the
// parameters alone, so all processes cut alike.
#include "cohort/parallel/virtual_ranks/internal/flat_gradients.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/parallel/internal/buckets.h"
#include "cohort/parallel/internal/coalesce.h"

namespace cohort::parallel {
namespace {

constexpr std::int64_t kLastBucketBytes = 1 << 20;

// A sum of products with a number of samples does not fit half precision.
at::ScalarType type_of_sum(const at::Tensor& parameter) {
  const bool is_half = parameter.scalar_type() == at::kHalf || parameter.scalar_type() == at::kBFloat16;
  return is_half ? at::kFloat : parameter.scalar_type();
}

// Strided as the parameter, so that a gradient, which mostly is too, is copied front to back.
at::Tensor view_for(const at::Tensor& flat, std::int64_t begin, const at::Tensor& parameter) {
  const at::Tensor piece = flat.narrow(0, begin, parameter.numel());
  if (!parameter.is_non_overlapping_and_dense()) return piece.view(parameter.sizes());
  return piece.as_strided(parameter.sizes(), parameter.strides());
}

}  // namespace

FlatGradients::FlatGradients(std::vector<at::Tensor> parameters, std::int64_t bucket_bytes,
                             std::int64_t padding, Allocate allocate)
    : parameters_(std::move(parameters)), padding_(padding), allocate_(std::move(allocate)) {
  // Backwards, as gradients come in a backward: the first bucket is complete first.
  const std::size_t count = parameters_.size();
  std::vector<BucketItem> items;
  for (std::size_t i = count; i-- > 0;) {
    items.push_back(
        {.bytes = static_cast<std::int64_t>(parameters_[i].nbytes()), .kind = kind_of(parameters_[i])});
  }
  // Nothing hides the bucket that is complete last, so it is small.
  for (const auto& list : fill_buckets(items, std::min(bucket_bytes, kLastBucketBytes), bucket_bytes)) {
    Bucket& bucket = buckets_.emplace_back();
    bucket_of_.resize(count);
    for (const std::size_t item : list) {
      bucket.parameters.push_back(count - 1 - item);
      bucket_of_[count - 1 - item] = buckets_.size() - 1;
      bucket.numel += parameters_[count - 1 - item].numel();
    }
  }
}

std::int64_t FlatGradients::bytes() const {
  std::int64_t bytes = 0;
  for (const at::Tensor& parameter : parameters_) bytes += static_cast<std::int64_t>(parameter.nbytes());
  return bytes;
}

std::int64_t FlatGradients::sum_itemsize(std::size_t bucket) const {
  const at::ScalarType type = type_of_sum(parameters_[buckets_[bucket].parameters.front()]);
  return static_cast<std::int64_t>(c10::elementSize(type));
}

FlatGradients::Slot& FlatGradients::slot_of(Bucket& bucket, std::size_t slot) {
  while (bucket.slots.size() <= slot) {
    Slot& made = bucket.slots.emplace_back();
    const at::Tensor& first = parameters_[bucket.parameters.front()];
    made.flat = allocate_(bucket.numel + padding_,
                          at::TensorOptions().dtype(type_of_sum(first)).device(first.device()));
    made.flat.zero_();
    std::int64_t begin = 0;
    for (const std::size_t i : bucket.parameters) {
      made.views.push_back(view_for(made.flat, begin, parameters_[i]));
      begin += parameters_[i].numel();
    }
  }
  return bucket.slots[slot];
}

const at::Tensor& FlatGradients::flat(std::size_t bucket, std::size_t slot) {
  return slot_of(buckets_[bucket], slot).flat;
}

void FlatGradients::take_leaf(std::size_t bucket, std::size_t slot, double weight,
                              std::vector<std::uint8_t>& flags) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor>& views = slot_of(buckets_[bucket], slot).views;
  for (std::size_t place = 0; place < views.size(); ++place) {
    const std::size_t i = buckets_[bucket].parameters[place];
    at::Tensor& gradient = parameters_[i].mutable_grad();
    if (gradient.defined() && gradient.is_sparse()) {
      throw UsageError(
          "parallel.virtual_ranks",
          base::concat("gradient ", i, " ", gradient.sizes(), " is sparse, expected a dense one"),
          "EmbeddingOptions().sparse(false)");
    }
    // Not multiplied by a weight of 0: 0 * NaN of this virtual rank would reach all.
    if (!gradient.defined() || weight == 0) {
      views[place].zero_();
    } else if (gradient.scalar_type() == views[place].scalar_type()) {
      scale_into(views[place], gradient, weight);
    } else {
      scale_into(views[place].copy_(gradient), views[place], weight);
    }
    if (gradient.defined() && weight != 0) flags[i] = 1;
    gradient.reset();
  }
}

void FlatGradients::add_next(std::size_t bucket, std::size_t slot) {
  const at::NoGradGuard no_grad;
  const std::int64_t numel = buckets_[bucket].numel;
  at::Tensor sum = flat(bucket, slot).narrow(0, 0, numel);
  sum.add_(flat(bucket, slot + 1).narrow(0, 0, numel));
}

void FlatGradients::clear_gradients() {
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
}

void FlatGradients::release_memory() {
  for (Bucket& bucket : buckets_) bucket.slots.clear();
}

bool FlatGradients::has_gradients() const {
  for (const at::Tensor& parameter : parameters_) {
    if (parameter.grad().defined()) return true;
  }
  return false;
}

void FlatGradients::set_gradients(const std::vector<std::uint8_t>& flags) {
  for (Bucket& bucket : buckets_) {
    const std::vector<at::Tensor>& views = slot_of(bucket, 0).views;
    for (std::size_t place = 0; place < views.size(); ++place) {
      const std::size_t i = bucket.parameters[place];
      if (flags[i] != 0) parameters_[i].mutable_grad() = views[place].to(parameters_[i].scalar_type());
    }
  }
}

}  // namespace cohort::parallel

// Gradients are grouped by definition first, then by the arrival in the first backward, and on CPUs by
// measured times. What is measured differs between ranks, so rank 0 sends its grouping: all ranks have the
// same buckets. The plan of measured times replaces buckets by size only where it promises a gain beyond the
// noise. A bucket of a single gradient is reduced in autograd's memory where nobody else reads that; the rest
// are copied, scaled.
#include "cohort/parallel/internal/gradient_buckets.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <unordered_map>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/parallel/internal/coalesce.h"
#include "cohort/parallel/internal/sparse_reduce.h"

namespace cohort::parallel {
namespace {

using Clock = std::chrono::steady_clock;

// Backwards that are measured. Those before are slower: in the first ten steps ranks compare their calls.
constexpr std::int64_t kFirstMeasured = 10, kEndMeasured = 18;

std::string layout_of(const std::vector<Gradient>& gradients) {
  std::string text;
  // In the order of definition, so that an error names what the user wrote.
  for (auto entry = gradients.rbegin(); entry != gradients.rend(); ++entry) {
    const at::Tensor& parameter = entry->parameter;
    text += base::concat(entry->name, " ", parameter.dtype().name(), parameter.sizes(), " strides ",
                         parameter.strides(), "\n");
  }
  return text;
}

// A tensor in the memory of `of`, from its element `begin` on. It is no view in autograd's books, since
// detach_(), which torch::optim's zero_grad() calls, rejects views.
at::Tensor alias_of(const at::Tensor& of, std::int64_t begin, at::IntArrayRef sizes,
                    at::IntArrayRef strides) {
  at::Tensor alias = at::empty({0}, of.options());
  alias.set_(of.storage(), of.storage_offset() + begin, sizes, strides);
  return alias;
}

// A piece of `flat` with the shape of a parameter, and its strides where these leave no gap.
at::Tensor view_of(const at::Tensor& flat, std::int64_t begin, const at::Tensor& parameter) {
  const bool is_dense = parameter.is_non_overlapping_and_dense();
  return alias_of(flat, begin, parameter.sizes(), is_dense ? parameter.strides() : at::IntArrayRef());
}

bool is_at(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.layout() == at::kStrided && gradient.data_ptr() == view.data_ptr() &&
         gradient.strides() == view.strides();
}

// Whether elements lie in memory as those of the parameter, which are in the same order on every rank: zeros
// without memory lie nowhere, and lazily conjugate or negative ones as others do not.
bool has_layout_of(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (gradient._is_zerotensor() || gradient.is_conj() || gradient.is_neg()) return false;
  return gradient.device() == parameter.device() && gradient.strides() == parameter.strides() &&
         parameter.is_non_overlapping_and_dense();
}

// All elements of a tensor without gaps, as they lie in memory.
at::Tensor flat_of(const at::Tensor& dense) {
  return alias_of(dense, 0, {dense.numel()}, {1});
}

// Buckets of places in an order, as buckets of what stands there.
BucketList in_order(BucketList lists, const std::vector<std::size_t>& order) {
  for (auto& list : lists) {
    for (std::size_t& place : list) place = order[place];
  }
  return lists;
}

}  // namespace

GradientBuckets::GradientBuckets(comm::Group group, std::vector<NamedParameter> parameters,
                                 const ReducerOptions& options)
    : group_(std::move(group)), options_(options) {
  if (!group_) throw UsageError("parallel.reduce", "this process is not in the group");
  if (options_.first_bucket_bytes < 1 || options_.bucket_cap_bytes < 1) {
    throw UsageError("parallel.reduce",
                     base::concat("buckets of ", options_.first_bucket_bytes, " and ",
                                  options_.bucket_cap_bytes, " bytes, expected at least 1"));
  }
  if (parameters.empty()) throw UsageError("parallel.reduce", "there is no parameter that needs a gradient");
  // The last parameter first: its gradient is the first to come, as a rule.
  for (std::size_t i = parameters.size(); i-- > 0;) {
    Gradient& gradient = gradients.emplace_back();
    gradient.name = std::move(parameters[i].name);
    gradient.parameter = std::move(parameters[i].tensor);
    gradient.is_sparse = parameters[i].is_sparse;
  }
  if (is_distributed())
    comm::require_same(group_, "the list of parameters", layout_of(gradients), {options_.timeout});
  make_buckets(options_.buckets.empty() ? by_size(dense_ones()) : own_buckets());
}

std::vector<std::size_t> GradientBuckets::dense_ones() const {
  std::vector<std::size_t> list;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].is_sparse) list.push_back(i);
  }
  return list;
}

BucketList GradientBuckets::own_buckets() const {
  std::unordered_map<std::string, std::size_t> by_name;
  for (const std::size_t i : dense_ones()) by_name[gradients[i].name] = i;
  BucketList lists;
  for (const auto& names : options_.buckets) {
    std::vector<std::size_t>& list = lists.emplace_back();
    for (const std::string& name : names) {
      const auto found = by_name.find(name);
      if (found == by_name.end()) {
        throw UsageError("parallel.reduce",
                         base::concat("bucket ", lists.size() - 1, " has \"", name,
                                      "\", which is no parameter, or is in another bucket"));
      }
      list.push_back(found->second);
      by_name.erase(found);
    }
    const std::vector<BucketItem> items = items_in(list);
    if (items.empty() ||
        std::ranges::any_of(items, [&](const auto& item) { return item.kind != items[0].kind; })) {
      throw UsageError("parallel.reduce",
                       base::concat("bucket ", lists.size() - 1,
                                    " is empty, or has parameters of several types or devices"));
    }
  }
  if (!by_name.empty()) {
    throw UsageError("parallel.reduce",
                     base::concat("parameter ", by_name.begin()->first, " is in no bucket"));
  }
  return lists;
}

void GradientBuckets::make_buckets(const BucketList& lists) {
  // Memory of the old buckets goes first, but for what gradients still live in.
  std::vector<at::Tensor> kept(gradients.size());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    at::Tensor& gradient = gradients[i].parameter.mutable_grad();
    if (gradients[i].view.defined() && gradient.defined() && is_at(gradient, gradients[i].view)) {
      kept[i] = gradient = gradient.clone();
    }
    gradients[i].view = at::Tensor();
  }
  buckets.clear();
  for (const auto& list : lists) {
    Bucket& bucket = buckets.emplace_back();
    bucket.gradients = list;
    for (const std::size_t i : list) gradients[i].bucket = buckets.size() - 1;
    const at::Tensor& first = gradients[list.front()].parameter;
    // A backend that is faster in memory of its own gets a copy there.
    bucket.in_place = list.size() == 1 && !group_.has_own_memory(first.device());
    if (!is_distributed() || bucket.in_place) continue;
    give_memory(bucket);
    for (const std::size_t i : list) {
      if (!kept[i].defined()) continue;
      gradients[i].view.copy_(kept[i]);
      gradients[i].parameter.mutable_grad() = gradients[i].view;
      kept[i] = at::Tensor();
    }
  }
}

void GradientBuckets::give_memory(Bucket& bucket) {
  std::int64_t numel = 0;
  for (const std::size_t i : bucket.gradients) numel += gradients[i].parameter.numel();
  const at::Tensor& first = gradients[bucket.gradients.front()].parameter;
  bucket.flat = group_.empty({numel}, first.options().requires_grad(false));
  std::int64_t at = 0;
  for (const std::size_t i : bucket.gradients) {
    gradients[i].view = view_of(bucket.flat, at, gradients[i].parameter);
    at += gradients[i].parameter.numel();
  }
}

std::vector<BucketItem> GradientBuckets::items_in(const std::vector<std::size_t>& order) const {
  std::vector<BucketItem> items;
  for (const std::size_t i : order) {
    const Gradient& gradient = gradients[i];
    items.push_back({.bytes = static_cast<std::int64_t>(gradient.parameter.nbytes()),
                     .kind = kind_of(gradient.parameter),
                     .ready = gradient.ready});
  }
  return items;
}

// Every rank must have the same buckets, and what was measured differs.
BucketList GradientBuckets::of_rank_0(const BucketList& lists) const {
  const std::size_t count = dense_ones().size();
  at::Tensor numbers = at::zeros({static_cast<std::int64_t>(count)}, at::kLong);
  at::Tensor bucket_of = numbers.clone();
  std::int64_t* const place = numbers.mutable_data_ptr<std::int64_t>();
  std::int64_t* const owner = bucket_of.mutable_data_ptr<std::int64_t>();
  std::size_t at = 0;
  for (const auto& list : lists) at += list.size();
  TORCH_INTERNAL_ASSERT(at == count, "buckets of ", at, " gradients, of ", count);
  at = 0;
  for (std::size_t b = 0; b < lists.size(); ++b) {
    for (const std::size_t i : lists[b]) {
      place[at] = static_cast<std::int64_t>(i);
      owner[at++] = static_cast<std::int64_t>(b);
    }
  }
  group_.broadcast(numbers, 0, {options_.timeout}).wait();
  group_.broadcast(bucket_of, 0, {options_.timeout}).wait();
  BucketList agreed;
  for (at = 0; at < count; ++at) {
    agreed.resize(static_cast<std::size_t>(owner[at]) + 1);
    agreed.back().push_back(static_cast<std::size_t>(place[at]));
  }
  return agreed;
}

BucketList GradientBuckets::by_size(const std::vector<std::size_t>& order) const {
  return in_order(fill_buckets(items_in(order), options_.first_bucket_bytes, options_.bucket_cap_bytes),
                  order);
}

void GradientBuckets::begin_backward() {
  if (backwards_ == 0) arrivals_.clear();  // of a backward that was not reduced
}

void GradientBuckets::record_ready(std::size_t index, double seconds) {
  if (gradients[index].is_sparse) return;
  if (backwards_ == 0) arrivals_.push_back(index);
  if (backwards_ >= kFirstMeasured && backwards_ < kEndMeasured) gradients[index].ready += seconds;
}

void GradientBuckets::regroup() {
  if (!options_.buckets.empty() || !is_distributed() || backwards_ == 0) return;
  // A GPU's gradients come when their kernels are queued, which says nothing of when they are there.
  const bool is_on_cpu =
      std::ranges::all_of(gradients, [](const Gradient& each) { return each.parameter.is_cpu(); });
  if (grouped_ == Grouped::kByDefinition && options_.plan != BucketPlan::kDefinition) {
    // What did not come in this backward goes last.
    std::vector<std::size_t> order = arrivals_;
    std::vector<bool> came(gradients.size(), false);
    for (const std::size_t i : arrivals_) came[i] = true;
    for (const std::size_t i : dense_ones()) {
      if (!came[i]) order.push_back(i);
    }
    make_buckets(of_rank_0(by_size(order)));
    grouped_ = Grouped::kByArrival;
  } else if (grouped_ == Grouped::kByArrival && options_.plan == BucketPlan::kMeasured &&
             backwards_ >= kEndMeasured && is_on_cpu) {
    make_buckets(of_rank_0(plan()));
    grouped_ = Grouped::kByPlan;
  }
}

// Two sizes, each at its best: what a reduction takes when nothing is in its way.
LinkCost GradientBuckets::measure_link() const {
  constexpr std::int64_t kSmall = 4 << 10, kLarge = 4 << 20;
  const auto best_of = [&](std::int64_t bytes) {
    at::Tensor flat = group_.empty({bytes / 4}, at::kFloat);
    flat.zero_();
    double best = 1e9;
    for (int i = 0; i < 4; ++i) {
      const auto start = Clock::now();
      group_.all_reduce(flat, comm::ReduceOp::SUM, {options_.timeout}).wait();
      best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
    }
    return best;
  };
  const double small = best_of(kSmall), large = best_of(kLarge);
  const double per_byte = std::max(0.0, (large - small) / static_cast<double>(kLarge - kSmall));
  return {.latency = std::max(1e-7, small - per_byte * kSmall), .seconds_per_byte = per_byte};
}

BucketList GradientBuckets::plan() const {
  const LinkCost link = measure_link();
  std::vector<std::size_t> order = dense_ones();
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return gradients[i].ready; });
  std::vector<BucketItem> items = items_in(order);
  for (BucketItem& item : items) item.ready /= kEndMeasured - kFirstMeasured;
  const BucketList filled = fill_buckets(items, options_.first_bucket_bytes, options_.bucket_cap_bytes);
  const BucketList planned = plan_buckets(items, link);
  const double before = finish_time(items, filled, link), after = finish_time(items, planned, link);
  // A gain within the noise of what was measured is none.
  const bool is_better = after < before * 0.98;
  if (group_.rank() == 0) {
    base::log_info(base::concat("gradient buckets: ", is_better ? planned.size() : filled.size(), " for ",
                                gradients.size(), " gradients; reduced ", std::lround(after * 1e6),
                                " us after backward begins, ", std::lround(before * 1e6), " with ",
                                filled.size(), " by size (a reduction: ", std::lround(link.latency * 1e6),
                                " us and ", std::lround(link.seconds_per_byte * 1e6 * (1 << 20)),
                                " us/MiB)"));
  }
  return in_order(is_better ? planned : filled, order);
}

void GradientBuckets::put(Gradient& gradient, double scale, std::size_t owners) {
  at::Tensor& grad = gradient.parameter.mutable_grad();
  if (grad.defined() && (grad.layout() != at::kStrided || grad.dtype() != gradient.parameter.dtype())) {
    throw UsageError("parallel.reduce",
                     base::concat("the gradient of ", gradient.name, " is ",
                                  grad.layout() != at::kStrided ? "sparse" : grad.dtype().name(),
                                  ", expected a dense one of ", gradient.parameter.dtype().name()),
                     "NamedParameter::is_sparse");
  }
  const at::NoGradGuard no_grad;
  // Of an earlier step: it keeps its bits, unless another rank uses the parameter.
  const bool is_left_over = (options_.find_unused_parameters || options_.static_graph) && grad.defined() &&
                            !gradient.is_used && !gradient.is_accumulated;
  if (Bucket& bucket = buckets[gradient.bucket]; bucket.in_place) {
    // Nobody else reads this memory, so the sum may take its place.
    if (grad.defined() && scale != 0 && !is_left_over && has_layout_of(grad, gradient.parameter) &&
        grad.storage().use_count() <= owners) {
      bucket.flat = flat_of(grad);
      gradient.view = grad;
    } else {
      give_memory(bucket);
    }
  }
  if (is_left_over && is_at(grad, gradient.view)) grad = grad.clone();
  if (!grad.defined() || scale == 0) {
    gradient.view.zero_();
  } else if (!is_at(grad, gradient.view)) {
    scale_into(gradient.view, grad, scale);
  } else if (scale != 1) {
    scale_into(gradient.view, gradient.view, scale);
  }
  if (options_.gradient_as_bucket_view && grad.defined() && !is_left_over) grad = gradient.view;
}

void GradientBuckets::launch(std::size_t index) {
  Bucket& bucket = buckets[index];
  if (!options_.hook) {
    bucket.reduction = all_reduce(group_, bucket.flat, options_.timeout);
    return;
  }
  std::vector<std::size_t> offsets, lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> parameters;
  std::size_t at = 0;
  for (const std::size_t i : bucket.gradients) {
    const at::Tensor& parameter = gradients[i].parameter;
    offsets.push_back(at);
    lengths.push_back(static_cast<std::size_t>(parameter.numel()));
    sizes.push_back(parameter.sizes());
    parameters.push_back(parameter);
    at += lengths.back();
  }
  c10d::GradBucket view(index, buckets.size(), bucket.flat, std::move(offsets), std::move(lengths),
                        std::move(sizes), std::move(parameters), std::nullopt);
  bucket.reduction = options_.hook({view, group_, options_.timeout});
}

void GradientBuckets::wait_for_all() {
  // In rounds: a reduction of two steps begins its second one while others are under way.
  for (bool any = true; any;) {
    any = false;
    for (Bucket& bucket : buckets) {
      if (bucket.reduction && bucket.reduction->advance()) {
        any = true;
      } else {
        bucket.reduction = nullptr;
      }
    }
  }
}

void GradientBuckets::reduce_sparse_ones(double scale) {
  for (Gradient& gradient : gradients) {
    if (!gradient.is_sparse) continue;
    const at::Tensor& grad = gradient.parameter.grad();
    if (grad.defined() && !grad.is_sparse()) {
      throw UsageError("parallel.reduce",
                       base::concat("the gradient of ", gradient.name, " is dense, expected a sparse one"));
    }
    gradient.view = reduce_sparse(group_, grad, gradient.parameter, scale, options_.timeout);
  }
}

void GradientBuckets::scatter_to_grads(const at::Tensor& used, ReduceReport& report) {
  double squares = 0;
  const auto count = [&](const at::Tensor& numbers) {
    report.bytes += static_cast<std::int64_t>(numbers.nbytes());
    if (!options_.norm) return;
    // The squares of half precision numbers overflow in their own type.
    const at::Tensor real = numbers.is_complex() ? at::view_as_real(numbers) : numbers;
    const auto type = real.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const auto norm = at::linalg_vector_norm(real, 2, {}, /*keepdim=*/false, type).item<double>();
    squares += norm * norm;
  };
  for (const Bucket& bucket : buckets) count(bucket.flat);
  for (const Gradient& gradient : gradients) {
    if (gradient.is_sparse) count(gradient.view.values());
  }
  if (options_.norm) report.norm = std::sqrt(squares);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    // No rank has used it, so its gradient stays as it was.
    if (used.defined() && used.const_data_ptr<int>()[i] == 0) continue;
    at::Tensor& grad = gradients[i].parameter.mutable_grad();
    if (gradients[i].is_sparse || options_.gradient_as_bucket_view) {
      grad = gradients[i].view;
    } else if (!grad.defined() || grad._is_zerotensor()) {
      grad = gradients[i].view.clone();
    } else if (!is_at(grad, gradients[i].view)) {
      grad.copy_(gradients[i].view);
    }
  }
  for (Gradient& gradient : gradients) {
    if (gradient.is_sparse) gradient.view = at::Tensor();
  }
  for (Bucket& bucket : buckets) {
    if (bucket.in_place) bucket.flat = gradients[bucket.gradients.front()].view = at::Tensor();
  }
}

std::vector<std::vector<std::string>> GradientBuckets::names() const {
  std::vector<std::vector<std::string>> lists;
  for (const Bucket& bucket : buckets) {
    auto& list = lists.emplace_back();
    for (const std::size_t i : bucket.gradients) list.push_back(gradients[i].name);
  }
  return lists;
}

}  // namespace cohort::parallel

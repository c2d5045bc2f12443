// Results are sorted by the tensor whose memory they view. Where two of them overlap, that base keeps its
// history, and the views are cut off and noted: offset, sizes, strides, type. restore() makes them again as
// views of the base. Always: a note names the base or an earlier result, so restore() needs one pass, in
// order. Results that do not overlap stay as they are, since a write to either changes nothing in the other.
#include "cohort/autograd/output_aliases.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "cohort/autograd/detached_graph.h"
#include "cohort/core/overlap.h"

namespace cohort::autograd {

using torch::autograd::CreationMeta;

namespace {

// The view of `base` whose elements of type `dtype` lie there; `offset` counts such elements, from the
// beginning of the storage.
at::Tensor view_at(const at::Tensor& base, at::ScalarType dtype, at::IntArrayRef sizes,
                   at::IntArrayRef strides, std::int64_t offset) {
  if (base.scalar_type() == dtype) return base.as_strided(sizes, strides, offset);
  const at::Tensor plain = base.is_neg() ? base._neg_view() : base;
  if (plain.is_complex()) {
    return at::view_as_real(plain.is_conj() ? plain.conj() : plain).as_strided(sizes, strides, offset);
  }
  std::vector<std::int64_t> in_pairs(sizes.begin(), sizes.end()), steps;
  for (const std::int64_t stride : strides) steps.push_back(2 * stride);
  in_pairs.push_back(2);
  steps.push_back(1);
  return at::view_as_complex(plain.as_strided(in_pairs, steps, 2 * offset));
}

// Where a tensor begins in its storage.
std::int64_t first_byte(const at::Tensor& tensor) {
  return tensor.storage_offset() * tensor.element_size();
}

// Whether the graph of a view goes back to `base`. A view that was taken without gradients has no graph. But
// where one operator returns several such views they have a node, which does not say where it ends.
bool leads_to(const at::Tensor& view, const at::Tensor& base) {
  const torch::autograd::Node* const end = edge_of(base).function.get();
  const torch::autograd::Node* node = edge_of(view).function.get();
  while (node != nullptr && node != end && node->num_outputs() == 1) {
    node = node->next_edge(0).function.get();
    if (node == nullptr) return false;
  }
  return true;
}

// Whether `tensor` is `base`, or a view of it that autograd knows how to make.
bool is_made_of(const at::Tensor& tensor, const at::Tensor& base) {
  if (tensor.is_same(base)) return true;
  if (!tensor.is_view() || !tensor._base().is_same(base)) return false;
  if (!tensor.requires_grad()) return true;
  const auto how = torch::autograd::impl::get_view_autograd_meta(tensor)->get_creation_meta();
  if (how != CreationMeta::DEFAULT && how != CreationMeta::MULTI_OUTPUT_NODE) return false;
  if (tensor.grad_fn() == nullptr) return false;  // a leaf, whose gradient is not the base's
  return how == CreationMeta::DEFAULT || leads_to(tensor, base);
}

// Whether two of these have a part in common.
bool any_overlap(const std::vector<at::Tensor>& results, const std::vector<std::size_t>& some) {
  for (std::size_t a = 0; a < some.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      if (core::may_overlap(results[some[a]], results[some[b]])) return true;
    }
  }
  return false;
}

// `view`, read as complex conjugated and negated numbers as asked for.
at::Tensor with_bits(at::Tensor view, bool is_conj, bool is_neg) {
  if (view.is_conj() != is_conj) view = view.conj();
  return view.is_neg() == is_neg ? view : view._neg_view();
}

}  // namespace

bool can_be_viewed(const at::Tensor& base, const at::Tensor& like) {
  if (base.dtype() == like.dtype()) return true;
  if (base.is_complex()) return c10::toRealValueType(base.scalar_type()) == like.scalar_type();
  return like.is_complex() && c10::toRealValueType(like.scalar_type()) == base.scalar_type();
}

at::Tensor view_like(const at::Tensor& base, const at::Tensor& like) {
  return with_bits(view_at(base, like.scalar_type(), like.sizes(), like.strides(), like.storage_offset()),
                   like.is_conj(), like.is_neg());
}

bool is_remade_view(const at::Tensor& tensor, const at::Tensor& base) {
  return tensor.defined() && base.defined() && is_made_of(tensor, base) && can_be_viewed(base, tensor);
}

bool is_writable_view(const at::Tensor& tensor, const at::Tensor& base) {
  return is_remade_view(tensor, base) &&
         (tensor.is_same(base) || !tensor.requires_grad() || tensor.grad_fn()->num_outputs() == 1);
}

void OutputAliases::detach(std::vector<at::Tensor>& results, const std::vector<at::Tensor>& kept_bases) {
  num_results_ = results.size();
  std::vector<bool> is_done(num_results_);
  for (std::size_t first = 0; first < num_results_; ++first) {
    if (is_done[first] || !results[first].defined()) continue;
    const at::Tensor origin(results[first].is_view() ? at::Tensor(results[first]._base()) : results[first]);
    const bool is_remade = is_remade_view(results[first], origin);
    const auto is_made_alike = [&](const at::Tensor& result) {
      return is_remade ? is_remade_view(result, origin) : result.is_same(results[first]);
    };
    std::vector<std::size_t> alike;
    for (std::size_t i = first; i < num_results_; ++i) {
      if (!is_made_alike(results[i])) continue;
      is_done[i] = true;
      alike.push_back(i);
    }
    const bool is_parameter = origin.is_leaf() && origin.requires_grad();  // nobody may write to its views
    const bool is_other = std::any_of(kept_bases.begin(), kept_bases.end(),
                                      [&](const at::Tensor& other) { return other.is_same(origin); });
    if (is_parameter || is_other || !any_overlap(results, alike)) continue;
    cut_off(results, alike, is_remade ? origin : results[first]);
  }
  num_with_bases_ = results.size();
}

void OutputAliases::cut_off(std::vector<at::Tensor>& results, const std::vector<std::size_t>& alike,
                            const at::Tensor& base) {
  const std::vector<at::Tensor> before = results;
  const auto place_of = [&](const at::Tensor& tensor) {
    const auto found = std::find_if(before.begin(), before.end(),
                                    [&](const at::Tensor& result) { return result.is_same(tensor); });
    return static_cast<std::size_t>(found - before.begin());
  };
  const std::size_t at = place_of(base);
  if (at == results.size()) results.push_back(base);
  for (const std::size_t i : alike) {
    if (i == at) continue;
    at::Tensor& result = results[i];
    const std::size_t same = place_of(result);
    views_.push_back({.result = i,
                      .base = same < i ? same : at,
                      .is_same = same < i,
                      .dtype = result.scalar_type(),
                      .is_conj = result.is_conj(),
                      .is_neg = result.is_neg(),
                      .sizes = result.sizes().vec(),
                      .strides = result.strides().vec(),
                      .bytes = first_byte(result) - first_byte(base)});
    result = result.detach();
  }
}

bool OutputAliases::misses_one_of(const std::vector<at::Tensor>& results) const {
  const auto is_made_anew = [this](std::size_t result) {
    return std::ranges::any_of(views_, [=](const View& view) { return view.result == result; });
  };
  const auto may_be_seen = [&](std::size_t i) {
    return results[i].defined() && results[i].has_storage() && !is_made_anew(i);
  };
  for (std::size_t a = 0; a < num_with_bases_; ++a) {
    if (!may_be_seen(a)) continue;
    for (std::size_t b = 0; b < a; ++b) {
      if (!may_be_seen(b) || results[a].is_same(results[b]) || !results[a].is_alias_of(results[b])) continue;
      if (needs_gradient(results[a]) && needs_gradient(results[b]) &&
          core::may_overlap(results[a], results[b]))
        return true;
    }
  }
  return false;
}

void OutputAliases::restore(std::vector<at::Tensor>& results) const {
  if (views_.empty()) return;
  for (const View& view : views_) {
    const at::Tensor& base = results[view.base];
    if (view.is_same) {
      results[view.result] = base;
      continue;
    }
    const std::int64_t offset =
        (first_byte(base) + view.bytes) / static_cast<std::int64_t>(c10::elementSize(view.dtype));
    results[view.result] =
        with_bits(view_at(base, view.dtype, view.sizes, view.strides, offset), view.is_conj, view.is_neg);
  }
  results.resize(num_results_);
}

}  // namespace cohort::autograd

#include "cohort/core/result_views.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "cohort/core/graph_part.h"
#include "cohort/core/overlap.h"

namespace cohort::core {

using torch::autograd::CreationMeta;

namespace {

// Whether the elements of `tensor` are read as those of `base`: as_strided() makes the one of the other.
bool has_elements_of(const at::Tensor& tensor, const at::Tensor& base) {
  return tensor.dtype() == base.dtype() && tensor.is_conj() == base.is_conj() &&
         tensor.is_neg() == base.is_neg();
}

// Whether the numbers of a real tensor lie in pairs, as view_as_complex() wants them.
bool lies_in_pairs(const at::Tensor& tensor) {
  if (tensor.dim() == 0 || tensor.size(-1) != 2 || tensor.stride(-1) != 1) return false;
  const auto strides = tensor.strides().slice(0, tensor.strides().size() - 1);
  return tensor.storage_offset() % 2 == 0 &&
         std::ranges::all_of(strides, [](std::int64_t stride) { return stride % 2 == 0; });
}

// `base` with elements of the type of `like`.
at::Tensor with_type_of(const at::Tensor& base, const at::Tensor& like) {
  if (base.dtype() == like.dtype()) return base;
  const at::Tensor plain = base.is_neg() ? base._neg_view() : base;
  if (!plain.is_complex()) return at::view_as_complex(plain);
  return at::view_as_real(plain.is_conj() ? plain.conj() : plain);
}

// Whether the graph of a view goes back to `base`. Of a view that was taken without gradients, those that are
// taken several at once have a node, and say nothing of where it ends.
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
  const auto how = torch::autograd::impl::get_view_autograd_meta(tensor)->get_creation_meta();
  if (how == CreationMeta::DEFAULT || !tensor.requires_grad()) return true;
  return how == CreationMeta::MULTI_OUTPUT_NODE && leads_to(tensor, base);
}

// Whether two of these have a part in common.
bool meet(const std::vector<at::Tensor>& results, const std::vector<std::size_t>& some) {
  for (std::size_t a = 0; a < some.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      if (may_overlap(results[some[a]], results[some[b]])) return true;
    }
  }
  return false;
}

// What as_strided() makes `result` of, a view of `origin` or that itself; undefined: nothing.
at::Tensor base_of(const at::Tensor& result, const at::Tensor& origin) {
  if (!is_made_of(result, origin)) return {};
  if (has_elements_of(result, origin)) return origin;
  if (!origin.is_complex() || origin.is_conj() || result.is_complex()) return {};
  const at::AutoGradMode gradients_on(true);
  const at::Tensor numbers = at::view_as_real(origin);
  return has_elements_of(result, numbers) ? numbers : at::Tensor();  // it may be negated
}

}  // namespace

bool can_be_viewed(const at::Tensor& base, const at::Tensor& like) {
  if (base.dtype() == like.dtype()) return true;
  if (base.is_complex()) return c10::toRealValueType(base.scalar_type()) == like.scalar_type();
  return like.is_complex() && c10::toRealValueType(like.scalar_type()) == base.scalar_type() &&
         lies_in_pairs(base);
}

at::Tensor view_like(const at::Tensor& base, const at::Tensor& like) {
  at::Tensor view = with_type_of(base, like);
  view = view.as_strided(like.sizes(), like.strides(), like.storage_offset());
  if (view.is_conj() != like.is_conj()) view = view.conj();
  return view.is_neg() == like.is_neg() ? view : view._neg_view();
}

bool is_remade_view(const at::Tensor& tensor, const at::Tensor& base) {
  return tensor.defined() && base.defined() && is_made_of(tensor, base) && can_be_viewed(base, tensor);
}

void ResultViews::take_out(std::vector<at::Tensor>& results, const std::vector<at::Tensor>& others) {
  num_results_ = results.size();
  std::vector<bool> is_done(num_results_);
  for (std::size_t first = 0; first < num_results_; ++first) {
    if (is_done[first] || !results[first].defined()) continue;
    const at::Tensor origin(results[first].is_view() ? at::Tensor(results[first]._base()) : results[first]);
    const at::Tensor base = base_of(results[first], origin);
    const auto is_made_alike = [&](const at::Tensor& result) {
      if (!base.defined()) return result.is_same(results[first]);
      return result.defined() && is_made_of(result, origin) && has_elements_of(result, base);
    };
    std::vector<std::size_t> alike;
    for (std::size_t i = first; i < num_results_; ++i) {
      if (!is_made_alike(results[i])) continue;
      is_done[i] = true;
      alike.push_back(i);
    }
    const bool is_parameter = origin.is_leaf() && origin.requires_grad();  // nobody may write to its views
    const bool is_other = std::any_of(others.begin(), others.end(),
                                      [&](const at::Tensor& other) { return other.is_same(origin); });
    if (is_parameter || is_other || !meet(results, alike)) continue;
    cut_off(results, alike, base.defined() ? base : results[first]);
  }
}

void ResultViews::cut_off(std::vector<at::Tensor>& results, const std::vector<std::size_t>& alike,
                          at::Tensor base) {
  const std::vector<at::Tensor> before = results;
  const auto place_of = [&](const at::Tensor& tensor) {
    const auto found = std::find_if(before.begin(), before.end(),
                                    [&](const at::Tensor& result) { return result.is_same(tensor); });
    return static_cast<std::size_t>(found - before.begin());
  };
  const std::size_t at = place_of(base);
  const std::int64_t first = base.storage_offset();
  if (at == results.size()) results.push_back(std::move(base));
  for (const std::size_t i : alike) {
    if (i == at) continue;
    at::Tensor& result = results[i];
    const std::size_t same = place_of(result);
    views_.push_back({i, same < i ? same : at, same < i, result.sizes().vec(), result.strides().vec(),
                      result.storage_offset() - first});
    result = result.detach();
  }
}

bool ResultViews::misses_one_of(const std::vector<at::Tensor>& results) const {
  const auto is_made_anew = [this](std::size_t result) {
    return std::ranges::any_of(views_, [=](const View& view) { return view.result == result; });
  };
  const auto may_be_seen = [&](std::size_t i) {
    return results[i].defined() && results[i].has_storage() && !is_made_anew(i);
  };
  for (std::size_t a = 0; a < num_results_; ++a) {
    if (!may_be_seen(a)) continue;
    for (std::size_t b = 0; b < a; ++b) {
      if (!may_be_seen(b) || results[a].is_same(results[b]) || !results[a].is_alias_of(results[b])) continue;
      if (needs_gradient(results[a]) && needs_gradient(results[b]) && may_overlap(results[a], results[b]))
        return true;
    }
  }
  return false;
}

void ResultViews::put_back(std::vector<at::Tensor>& results) const {
  if (views_.empty()) return;
  for (const View& view : views_) {
    const at::Tensor& base = results[view.base];
    results[view.result] =
        view.is_same ? base : base.as_strided(view.sizes, view.strides, base.storage_offset() + view.offset);
  }
  results.resize(num_results_);
}

}  // namespace cohort::core

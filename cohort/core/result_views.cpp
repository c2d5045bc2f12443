#include "cohort/core/result_views.h"

#include <ATen/ops/as_strided.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "cohort/core/graph_part.h"
#include "cohort/core/overlap.h"

namespace cohort::core {

using torch::autograd::CreationMeta;

bool is_strided_view(const at::Tensor& tensor, const at::Tensor& base) {
  if (!tensor.defined() || !base.defined()) return false;
  if (tensor.is_same(base)) return true;
  if (!tensor.is_view() || !tensor._base().is_same(base)) return false;
  const auto how = torch::autograd::impl::get_view_autograd_meta(tensor)->get_creation_meta();
  const bool has_way = how == CreationMeta::DEFAULT || how == CreationMeta::MULTI_OUTPUT_NODE;
  return (has_way || !tensor.requires_grad()) && tensor.dtype() == base.dtype() &&
         tensor.is_conj() == base.is_conj() && tensor.is_neg() == base.is_neg();
}

namespace {

// Whether two of these have a part in common.
bool meet(const std::vector<at::Tensor>& results, const std::vector<std::size_t>& some) {
  for (std::size_t a = 0; a < some.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      if (may_overlap(results[some[a]], results[some[b]])) return true;
    }
  }
  return false;
}

}  // namespace

void ResultViews::take_out(std::vector<at::Tensor>& results, const std::vector<at::Tensor>& others) {
  num_results_ = results.size();
  std::vector<bool> is_done(num_results_);
  for (std::size_t first = 0; first < num_results_; ++first) {
    if (is_done[first] || !results[first].defined()) continue;
    const at::Tensor base(results[first].is_view() ? at::Tensor(results[first]._base()) : results[first]);
    const auto is_base = [&](const at::Tensor& tensor) { return tensor.is_same(base); };
    std::vector<std::size_t> alike;
    for (std::size_t i = first; i < num_results_; ++i) {
      if (!is_strided_view(results[i], base)) continue;
      is_done[i] = true;
      alike.push_back(i);
    }
    const bool is_parameter = base.is_leaf() && base.requires_grad();  // nobody may write to its views
    if (is_parameter || !meet(results, alike) || std::any_of(others.begin(), others.end(), is_base)) continue;
    const auto at =
        static_cast<std::size_t>(std::find_if(results.begin(), results.end(), is_base) - results.begin());
    if (at == results.size()) results.push_back(base);
    for (const std::size_t i : alike) {
      if (i == at) continue;
      at::Tensor& result = results[i];
      views_.push_back({i, at, is_base(result), result.sizes().vec(), result.strides().vec(),
                        result.storage_offset() - base.storage_offset()});
      result = result.detach();
    }
  }
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

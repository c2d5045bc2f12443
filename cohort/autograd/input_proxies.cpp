// A proxy shares the memory of its input and has a history of its own. After the function has run, a proxy
// whose graph edge is another than at first was written to. The proxy becomes a result, and write_back()
// gives its history to the input. Always: an input that is given twice has one proxy. A write that another
// input would see is rejected, as that input's history would not say so.
#include "cohort/autograd/input_proxies.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "cohort/autograd/detached_graph.h"
#include "cohort/autograd/output_aliases.h"
#include "cohort/base/error.h"
#include "cohort/core/overlap.h"

namespace cohort::autograd {
namespace {

using torch::autograd::impl::gradient_edge;

bool lies_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

bool are_of_one_base(const at::Tensor& a, const at::Tensor& b) {
  const auto base_of = [](const at::Tensor& tensor) { return tensor.is_view() ? tensor._base() : tensor; };
  return base_of(a).is_same(base_of(b));
}

// `input`, whose memory `result` shares, becomes what that is.
void take_history(at::Tensor input, const at::Tensor& result, const char* where) {
  if (!needs_gradient(result)) {
    input.detach_();
  } else if (!input.is_view()) {
    if (!lies_alike(input, result)) {
      input.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(),
                                                         result.storage_offset());
    }
    torch::autograd::impl::rebase_history(input, gradient_edge(result));
  } else {
    if (!lies_alike(input, result)) {
      throw UsageError(where, "an input that is a view changes its shape in place",
                       "hand over a clone(), or an operator that is not in place");
    }
    // A view's history is its base's too, and only an operator in place gives it one. The values are there
    // already, so it does not count as a change to who saved them. LibTorch takes a view for a leaf until it
    // is asked for the history that its base got since.
    input.grad_fn();
    auto counter = input.unsafeGetTensorImpl()->version_counter();
    const auto version = counter.current_version();
    input.copy_(result.clone());
    counter.set_version(version);
  }
}

}  // namespace

InputProxies::InputProxies(const char* where, const Tensors& inputs, const Tensors& leaves, Counts counts)
    : where_(where), inputs_(inputs), handed_(inputs), entries_(inputs.size()) {
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const at::Tensor& input = inputs_[i];
    if (!input.defined() || input.is_inference()) continue;
    if (const std::size_t first = core::first_place(inputs_, i); first != i) {
      handed_[i] = handed_[first];
      continue;
    }
    if (input.requires_grad() && input.is_leaf()) {
      handed_[i] = leaves[i];
      continue;
    }
    may_be_written_.push_back(i);
    handed_[i] = input.requires_grad() ? std::move(non_leaf_proxies({leaves[i]}).front()) : input.detach();
    entries_[i] = edge_of(handed_[i]);
    if (counts == Counts::kOwn && input.is_view()) counts_.emplace_back(handed_[i], input);
  }
}

void InputProxies::observe(Tensors& results) {
  for (std::size_t k = 0; k < results.size(); ++k) {
    for (const std::size_t i : may_be_written_) {
      if (is_writable_view(results[k], handed_[i])) views_.push_back({k, i, results[k].is_same(handed_[i])});
    }
  }
  output_aliases_.detach(results, handed_);
  num_results_ = results.size();
  for (const std::size_t i : may_be_written_) {
    if (handed_[i].is_leaf() && handed_[i].requires_grad()) continue;  // from here on, within the function
    if (edge_of(handed_[i]) == entries_[i]) continue;
    for (std::size_t k = 0; k < inputs_.size(); ++k) {
      if (!inputs_[k].defined() || handed_[k].is_same(handed_[i])) continue;
      const bool sees_it = inputs_[k].requires_grad() || are_of_one_base(inputs_[k], inputs_[i]);
      if (sees_it && core::may_overlap(inputs_[k], inputs_[i])) {
        throw UsageError(
            where_, base::concat("input ", i, " is changed in place, and input ", k, " shares its memory"),
            "hand over a clone() of one of them");
      }
    }
    written_.push_back(i);
    results.push_back(handed_[i]);
  }
}

// A view learns that its base has another history from the count of changes: that comes first.
void InputProxies::write_back(Tensors& results) {
  for (ScopedVersionCounter& count : counts_) count.publish();
  for (std::size_t w = 0; w < written_.size(); ++w) {
    take_history(inputs_[written_[w]], results[num_results_ + w], where_);
  }
  results.resize(num_results_);
  output_aliases_.restore(results);
  for (const View& view : views_) {
    at::Tensor& result = results[view.result];
    const at::Tensor& input = inputs_[view.input];
    result = view.is_input ? input : view_like(input, result);
  }
}

std::vector<ScopedVersionCounter> InputProxies::counts() const {
  std::vector<ScopedVersionCounter> counts = counts_;
  for (ScopedVersionCounter& count : counts) count.sync();
  return counts;
}

}  // namespace cohort::autograd

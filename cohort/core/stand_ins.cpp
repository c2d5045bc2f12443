#include "cohort/core/stand_ins.h"

#include <ATen/ops/as_strided.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "cohort/core/error.h"
#include "cohort/core/graph_part.h"
#include "cohort/core/overlap.h"

namespace cohort::core {
namespace {

using torch::autograd::impl::gradient_edge;

bool needs_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

bool lies_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

// A view to which somebody may write, made by operators that take one tensor.
bool is_view_of(const at::Tensor& result, const at::Tensor& handed) {
  if (!needs_gradient(result) || !needs_gradient(handed)) return false;
  if (result.is_same(handed)) return true;
  return result.is_view() && result._base().is_same(handed) && result.grad_fn()->num_outputs() == 1 &&
         result.dtype() == handed.dtype() && result.is_conj() == handed.is_conj() &&
         result.is_neg() == handed.is_neg() && !may_overlap(result);
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
    // already, so it does not count as a change to who saved them.
    auto counter = input.unsafeGetTensorImpl()->version_counter();
    const auto version = counter.current_version();
    input.copy_(result.clone());
    counter.set_version(version);
  }
}

}  // namespace

StandIns::StandIns(const char* where, const Tensors& inputs, const Tensors& leaves, Counts counts)
    : where_(where), inputs_(inputs), handed_(inputs), entries_(inputs.size()) {
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const at::Tensor& input = inputs_[i];
    const bool has_own_count =
        counts == Counts::kOwn && input.defined() && input.is_view() && !input.is_inference();
    if (!needs_gradient(input)) {
      if (has_own_count) handed_[i] = input.detach();
    } else if (input.is_leaf()) {
      handed_[i] = leaves[i];
      continue;
    } else {
      handed_[i] = std::move(entered({leaves[i]}).front());
      entries_[i] = gradient_edge(handed_[i]);
    }
    if (has_own_count) counts_.emplace_back(handed_[i], input);
  }
}

void StandIns::look_at(Tensors& results) {
  num_results_ = results.size();
  for (std::size_t k = 0; k < num_results_; ++k) {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (is_view_of(results[k], handed_[i])) views_.push_back({k, i, results[k].is_same(handed_[i])});
    }
  }
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (!entries_[i].is_valid() || gradient_edge(handed_[i]) == entries_[i]) continue;
    for (std::size_t k = 0; k < inputs_.size(); ++k) {
      if (k != i && needs_gradient(inputs_[k]) && may_overlap(inputs_[k], inputs_[i])) {
        throw UsageError(where_,
                         concat("input ", i, " is changed in place, and input ", k, " shares its memory"),
                         "hand over a clone() of one of them");
      }
    }
    written_.push_back(i);
    results.push_back(handed_[i]);
  }
}

void StandIns::settle(Tensors& results) {
  for (std::size_t w = 0; w < written_.size(); ++w) {
    take_history(inputs_[written_[w]], results[num_results_ + w], where_);
  }
  results.resize(num_results_);
  for (const View& view : views_) {
    at::Tensor& result = results[view.result];
    const at::Tensor& input = inputs_[view.input];
    result =
        view.is_input ? input : input.as_strided(result.sizes(), result.strides(), result.storage_offset());
  }
  for (PartCount& count : counts_) count.hand_on();
}

std::vector<PartCount> StandIns::counts() const {
  std::vector<PartCount> counts = counts_;
  for (PartCount& count : counts) count.look();
  return counts;
}

}  // namespace cohort::core

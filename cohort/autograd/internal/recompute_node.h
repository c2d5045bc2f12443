#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <vector>

namespace torch::autograd {
struct Node;
}

/// The node of a recompute() in the caller's graph.
namespace cohort::autograd::recompute_detail {

using Tensors = std::vector<at::Tensor>;

/// What the node runs in backward.
class SecondRun : public torch::CustomClassHolder {
 public:
  /// Of the node: inputs and parameters that need a gradient.
  virtual std::size_t num_edges() const = 0;
  /// Returns a gradient for each edge; `wanted` says which are used.
  virtual Tensors backward(const Tensors& saved, const Tensors& gradients,
                           const std::vector<bool>& wanted) = 0;
};

/// Returns `results` as results of a node that is a function of `edges`. It saves `to_save` for backward,
/// where it asks `run`.
Tensors attach_recompute_node(const Tensors& edges, const Tensors& results, const Tensors& to_save,
                              const c10::intrusive_ptr<SecondRun>& run);

/// True for such a node.
bool is_recompute_node(const torch::autograd::Node& node);

}  // namespace cohort::autograd::recompute_detail

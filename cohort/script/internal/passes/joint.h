#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <vector>

#include "cohort/script/internal/ir/tape.h"

/// Graphs of functions whose results lead to different leaves.
namespace cohort::script {

/// A backward that is no node of a graph.
struct WholeBackward {
  /// Returns all gradients; some grad_outputs are undefined.
  std::function<Tensors(Tensors grad_outputs)> backward;
  std::function<void()> release;  ///< what it keeps is needed no more
};

/// Makes those of `results` that need a gradient results of nodes around `whole`. `edges`: of all gradients,
/// in order. `reached_from`: by gradient, which of those results lead to it.
void join(WholeBackward whole, const std::vector<torch::autograd::Edge>& edges,
          const std::vector<std::vector<bool>>& reached_from, const std::vector<bool>& needs_gradient,
          Tensors& results);

/// Makes those of `results` that need a gradient results of `node`.
template <typename Node>
void set_histories(Tensors& results, const std::vector<bool>& needs_gradient, const Node& node) {
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (needs_gradient[i]) torch::autograd::set_history(results[i], node);
  }
}

/// A node that is in no graph, as what it does.
template <typename Node>
WholeBackward whole(const Node& node) {
  return {.backward = [node](Tensors grad_outputs) { return (*node)(std::move(grad_outputs)); },
          .release = [node] { node->release_variables(); }};
}

}  // namespace cohort::script

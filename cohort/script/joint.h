#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <vector>

#include "cohort/script/tape.h"

/// Graphs of functions whose results lead to different leaves.
namespace cohort::script {

/// A backward that is no node of a graph.
struct WholeBackward {
  std::function<Tensors(Tensors tangents)> backward;  ///< returns all gradients; some tangents are undefined
  std::function<void()> release;                      ///< what it keeps is needed no more
};

/// Makes those of `results` that need a gradient results of nodes around `whole`. `edges`: of all gradients,
/// in order. `reached_from`: by gradient, which of those results lead to it.
void join(WholeBackward whole, const std::vector<torch::autograd::Edge>& edges,
          const std::vector<std::vector<bool>>& reached_from, const std::vector<bool>& needs_gradient,
          Tensors& results);

/// Says which are defined.
std::vector<bool> defined(const Tensors& tensors);

}  // namespace cohort::script

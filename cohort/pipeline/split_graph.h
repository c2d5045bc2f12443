#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/edge.h>

#include <typeindex>
#include <vector>

#include "cohort/pipeline/stage.h"

/// Backward in two halves: the gradients of inputs now, those of weights later.
namespace cohort::pipeline {

/// The graph of one forward, which goes back once. Its two halves do together the work of a whole backward,
/// and give its bits; what the second half does not need is freed after the first. A graph with a post hook
/// on a node that both halves would run goes back as a whole in the first. Source: Qi et al., Zero
/// Bubble Pipeline Parallelism (2023), section 2; how, see Note [How a graph is split] in the source.
/// Threads: one caller at a time.
class SplitGraph {
 public:
  SplitGraph() = default;
  /// Of `outputs`, which were computed from `leaves`; undefined ones are passed over.
  SplitGraph(const Tensors& outputs, const Tensors& leaves);

  /// Returns the gradients of the leaves (undefined for those that need none), given those of the outputs
  /// (undefined: none came). Nobody else has their memory. Frees what only they needed.
  Tensors input_gradients(Tensors gradients);
  /// Adds the gradients of the parameters to their grad(), and frees the rest.
  void weight_gradients();

 private:
  using Edges = std::vector<torch::autograd::Edge>;

  // Where a second pass begins, and what arrives there.
  struct Roots {
    void add(const torch::autograd::Edge& edge, const at::Tensor& gradient);
    Edges edges;
    Tensors gradients;
  };

  Tensors all_gradients(const Roots& roots);

  Edges outputs_, leaves_;  // invalid where there is no gradient
  Roots later_;
  Edges weights_;  // what the second pass adds to
};

/// What register_splittable_backward() calls: `node` is the type of the autograd node.
void register_splittable_node(std::type_index node);

/// Says that the backward of an autograd Function computes those gradients only which needs_input_grad() asks
/// for, so that one of its weight can wait. Without it, all of a Function's gradients come with that of its
/// input, as they do of LibTorch's operators other than convolutions and products of matrices.
/// Threads: any.
template <typename Function>
void register_splittable_backward() {
  register_splittable_node(typeid(torch::autograd::CppNode<Function>));
}

}  // namespace cohort::pipeline

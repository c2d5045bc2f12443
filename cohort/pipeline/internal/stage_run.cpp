// The inputs become leaves, so the stage's graph begins there and goes back by itself. An input that occurs
// twice is the same leaf twice, and has its gradient at the first place only. Graph edges before and after
// the forward show which inputs the stage wrote to. With recomputation the stage runs within
// autograd::recompute() instead, and its inputs are not looked at.
#include "cohort/pipeline/internal/stage_run.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "cohort/autograd/detached_graph.h"
#include "cohort/autograd/recompute.h"
#include "cohort/core/overlap.h"

namespace cohort::pipeline {
namespace {

using torch::autograd::Edge;

Tensors leaf_inputs(const Tensors& inputs, const std::vector<bool>& requires_grad) {
  Tensors leaves;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const std::size_t first = core::first_place(inputs, i);
    if (first < i || !inputs[i].defined()) {
      leaves.push_back(first < i ? leaves[first] : inputs[i]);
    } else {
      leaves.push_back(inputs[i].detach().requires_grad_(requires_grad[i]));
    }
  }
  return leaves;
}

// The outputs that a gradient came for, and these.
struct Roots {
  Roots(const Tensors& of, const Tensors& given) {
    for (std::size_t i = 0; i < of.size(); ++i) {
      if (!given[i].defined() || !autograd::needs_gradient(of[i])) continue;
      outputs.push_back(of[i]);
      gradients.push_back(given[i]);
    }
  }
  Tensors outputs, gradients;
};

}  // namespace

StageRun::StageRun(const Stage& stage, const Tensors& inputs, const std::vector<bool>& requires_grad,
                   bool split, const std::optional<core::RandomKey>& random)
    : random_(random), leaves_(leaf_inputs(inputs, requires_grad)) {
  forward(stage);
  // From the back: the first place of a tensor must be there when its later ones look for it.
  for (std::size_t i = leaves_.size(); i-- > 0;) {
    if (!requires_grad[i] || core::first_place(leaves_, i) < i) leaves_[i].reset();
  }
  if (split) graph_ = SplitGraph(outputs_, leaves_);
}

void StageRun::forward(const Stage& stage) {
  const Tensors inputs = gate_.attach(leaves_);
  const std::size_t last = stage.layers().size();
  if (!stage.recomputes()) {
    const std::vector<Edge> entries = autograd::edges_of(inputs);
    outputs_ = stage.forward(inputs, 0, last, random_);
    const std::vector<Edge> now = autograd::edges_of(inputs);
    for (std::size_t i = 0; i < now.size(); ++i) {
      if (now[i] != entries[i]) written_.push_back(i);
    }
    return;
  }
  autograd::RecomputeOptions options;
  options.buffers = stage.buffers();
  options.preserve_rng_state = !random_;  // else both runs draw from the same generators anyway
  outputs_ = autograd::recompute(
      std::move(options),
      [stage, last, random = random_](const Tensors& again) { return stage.forward(again, 0, last, random); },
      inputs);
}

Tensors StageRun::backward(const Tensors& gradients) {
  const Roots roots(outputs_, gradients);
  const BackwardGate::Open open(gate_);
  if (!roots.outputs.empty()) torch::autograd::backward(roots.outputs, roots.gradients);
  outputs_.clear();
  Tensors result;
  for (const at::Tensor& leaf : leaves_) {
    result.push_back(leaf.defined() ? autograd::clone_if_shared(std::move(leaf.mutable_grad())) : leaf);
  }
  leaves_.clear();
  return result;
}

Tensors StageRun::input_gradients(Tensors gradients) {
  outputs_.clear();
  leaves_.clear();
  const BackwardGate::Open open(gate_);
  return graph_.input_gradients(std::move(gradients));
}

void StageRun::weight_gradients() {
  graph_.weight_gradients();
}

}  // namespace cohort::pipeline

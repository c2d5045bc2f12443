#include "cohort/pipeline/internal/backward_gate.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <utility>

#include "cohort/autograd/detached_graph.h"
#include "cohort/base/error.h"
#include "cohort/core/overlap.h"
#include "cohort/core/torch_compat.h"

namespace cohort::pipeline {
namespace {

// In place of a leaf's AccumulateGrad.
struct OwnGradient : torch::autograd::AccumulateGrad {
  OwnGradient(const at::Tensor& leaf, std::shared_ptr<std::atomic<bool>> is_open)
      : AccumulateGrad(leaf), is_open_(std::move(is_open)) {}
  Tensors apply(Tensors&& gradients) override {
    // Each gradient of the leaf ends here, whatever way it came.
    if (!*is_open_ && gradients.front().defined()) {
      throw UsageError("pipeline.stage",
                       "a backward reaches another micro-batch, of which a tensor was kept with its graph",
                       "detach() of what a stage or a loss keeps for later micro-batches");
    }
    return AccumulateGrad::apply(std::move(gradients));
  }
  std::string name() const override { return "cohort::pipeline::OwnGradient"; }

 private:
  const std::shared_ptr<std::atomic<bool>> is_open_;
};

}  // namespace

Tensors BackwardGate::attach(const Tensors& leaves) {
  Tensors inputs;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor& leaf = leaves[i];
    const std::size_t first = core::first_place(leaves, i);
    if (first < i || !leaf.defined() || !leaf.requires_grad()) {
      inputs.push_back(first < i ? inputs[first] : leaf);
      continue;
    }
    const auto node = COHORT_MAKE_NODE(OwnGradient, leaf, is_open_);
    // The leaf holds its accumulator weakly. The graph of its proxy keeps it alive.
    torch::autograd::impl::set_grad_accumulator(leaf, COHORT_WEAK_NODE(node));
    inputs.push_back(autograd::non_leaf_proxies({leaf}).front());
  }
  return inputs;
}

}  // namespace cohort::pipeline

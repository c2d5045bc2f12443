#include "cohort/pipeline/stage_run.h"

#include <torch/csrc/autograd/autograd.h>

#include <utility>

#include "cohort/core/error.h"
#include "cohort/core/graph_part.h"
#include "cohort/core/recompute.h"

namespace cohort::pipeline {
namespace {

constexpr const char* kWhere = "pipeline.stage";

Tensors leaves_of(const Tensors& inputs, const std::vector<bool>& requires_grad) {
  Tensors leaves;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    leaves.push_back(inputs[i].defined() ? inputs[i].detach().requires_grad_(requires_grad[i]) : inputs[i]);
  }
  return leaves;
}

// The outputs that a gradient came for, and these.
struct Roots {
  Roots(const Tensors& of, const Tensors& given) {
    for (std::size_t i = 0; i < of.size(); ++i) {
      if (!given[i].defined() || !of[i].defined() || !of[i].requires_grad()) continue;
      outputs.push_back(of[i]);
      gradients.push_back(given[i]);
    }
  }
  Tensors outputs, gradients;
};

Tensors trainable(const std::shared_ptr<torch::nn::Module>& module) {
  Tensors parameters;
  for (const at::Tensor& parameter : module->parameters()) {
    if (parameter.requires_grad()) parameters.push_back(parameter);
  }
  return parameters;
}

}  // namespace

StageRun::StageRun(const Stage& stage, const Tensors& inputs, const std::vector<bool>& requires_grad,
                   bool split, const std::optional<core::RandomKey>& random)
    : random_(random), leaves_(leaves_of(inputs, requires_grad)) {
  if (split) {
    forward_parts(stage, leaves_);
  } else {
    forward_whole(stage, core::entered(leaves_));
  }
}

void StageRun::forward_whole(const Stage& stage, const Tensors& inputs) {
  const std::size_t last = stage.layers().size();
  if (!stage.recomputes()) {
    outputs_ = stage.forward(inputs, 0, last, random_);
    return;
  }
  core::CheckpointOptions options;
  options.buffers = stage.buffers();
  options.preserve_rng_state = !random_;  // else both runs draw from the same generators anyway
  outputs_ = core::checkpoint(
      std::move(options),
      [stage, last, random = random_](const Tensors& again) { return stage.forward(again, 0, last, random); },
      inputs);
}

void StageRun::forward_parts(const Stage& stage, Tensors leaves) {
  const auto& layers = stage.layers();
  for (std::size_t first = 0; first < layers.size();) {
    Part part;
    part.parameters = trainable(layers[first].module);
    std::size_t last = first + 1;
    while (last < layers.size() && trainable(layers[last].module).empty()) ++last;
    part.outputs = stage.forward(core::entered(leaves), first, last, random_);
    if (last < layers.size() && part.outputs.size() != 1) {
      throw UsageError(
          kWhere,
          core::concat("layer ", layers[last - 1].name, " of ", stage.name(), " returns ",
                       part.outputs.size(), " tensors, expected one, as its gradients are to come apart"),
          "schedule 1f1b, or zb_h1 with a layer that takes and returns one");
    }
    part.leaves = std::move(leaves);
    leaves = core::leaves_of(part.outputs);
    parts_.push_back(std::move(part));
    first = last;
  }
  outputs_ = parts_.back().outputs;
}

Tensors StageRun::backward(const Tensors& gradients) {
  const Roots roots(outputs_, gradients);
  if (!roots.outputs.empty()) torch::autograd::backward(roots.outputs, roots.gradients);
  outputs_.clear();
  Tensors result;
  for (const at::Tensor& leaf : leaves_) result.push_back(leaf.defined() ? leaf.grad() : leaf);
  leaves_.clear();
  return result;
}

Tensors StageRun::input_gradients(const Tensors& gradients) {
  outputs_.clear();
  Tensors arriving = gradients;
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
    const Roots roots(part->outputs, arriving);
    Tensors wanted;
    for (const at::Tensor& leaf : part->leaves) {
      if (leaf.defined() && leaf.requires_grad()) wanted.push_back(leaf);
    }
    Tensors found(wanted.size());
    if (!wanted.empty() && !roots.outputs.empty()) {
      const bool more_to_come = !part->parameters.empty();
      found = torch::autograd::grad(roots.outputs, wanted, roots.gradients, more_to_come, false, true);
    }
    Tensors all;
    std::size_t next = 0;
    for (const at::Tensor& leaf : part->leaves) {
      all.push_back(leaf.defined() && leaf.requires_grad() ? found[next++] : at::Tensor());
    }
    if (part->parameters.empty()) {
      *part = Part();
    } else {
      part->gradients = std::exchange(arriving, {});
    }
    arriving = std::move(all);
  }
  leaves_.clear();
  return arriving;
}

void StageRun::weight_gradients() {
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
    if (!part->parameters.empty()) {
      const Roots roots(part->outputs, part->gradients);
      if (!roots.outputs.empty()) {
        torch::autograd::backward(roots.outputs, roots.gradients, /*retain_graph=*/false,
                                  /*create_graph=*/false, part->parameters);
      }
    }
    *part = Part();
  }
}

}  // namespace cohort::pipeline

// All results are those of a single node. An anchor brings the node its gradients, as it waits for the
// stages' threads. An extra edge gives it a place in the graph also where no input needs a gradient. Its
// backward runs once: it takes the batch, which holds the stages' graphs. Stages add to grad() themselves, so
// whatever asks for other gradients than backward()'s is rejected.
#include "cohort/pipeline/internal/pipeline_function.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include "cohort/autograd/anchor_node.h"
#include "cohort/autograd/detached_graph.h"
#include "cohort/base/error.h"
#include "cohort/pipeline/internal/batch.h"

namespace cohort::pipeline {
namespace {

using base::concat;
using torch::autograd::AutogradContext;
constexpr const char* kWhereForward = "pipeline.forward";

struct State : torch::CustomClassHolder {
  std::shared_ptr<Batch> batch;
  std::vector<std::int64_t> sizes;
  std::function<void(const std::shared_ptr<Batch>&)> backward;
  Tensors inputs;              // without graph: shapes and which need gradients
  std::vector<bool> attached;  // of the outputs
};

struct PipelineNode : torch::autograd::Function<PipelineNode> {
  static at::Tensor forward(AutogradContext* context, at::TensorList /*edges*/,
                            const c10::intrusive_ptr<torch::CustomClassHolder>& state) {
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    return autograd::make_anchor();
  }
  static Tensors backward(AutogradContext* context, const Tensors& of_the_anchor);
};

Tensors PipelineNode::backward(AutogradContext* context, const Tensors& of_the_anchor) {
  if (at::GradMode::is_enabled()) {
    throw UsageError(kWhereForward, "backward with create_graph goes through a pipeline, which has no graph",
                     "the model without a pipeline where second derivatives are taken");
  }
  // The engine's own sign that this backward accumulates gradients, and was asked for no others.
  if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
    throw UsageError(
        kWhereForward,
        "torch::autograd::grad(), or backward() with `inputs`, goes through a pipeline, whose parameters "
        "get their gradients by backward() alone",
        "loss.backward(), and read the gradients with grad()");
  }
  const auto capsule = context->saved_data["state"].toCapsule();
  State& state = static_cast<State&>(*capsule);
  if (autograd::is_device_autograd_thread()) {
    throw UsageError(
        kWhereForward,
        "backward goes through a pipeline within a backward on a GPU, whose thread the stages wait for",
        "the pipeline outside of autograd::recompute");
  }
  const Tensors gradients = autograd::take_gradients(of_the_anchor.front());
  const auto batch = std::exchange(state.batch, nullptr);
  if (!batch)
    throw UsageError(kWhereForward, "backward goes through a pipeline's result twice",
                     "one backward for each forward");
  Tensors full(state.attached.size());
  for (std::size_t i = 0, next = 0; i < full.size(); ++i) {
    if (state.attached[i]) full[i] = gradients[next++];
  }
  batch->output_gradients = split(full, state.sizes);
  for (autograd::ScopedVersionCounter& count : batch->counts) count.propagate();
  state.backward(batch);
  Tensors result;
  const Tensors joined = join_gradients(batch->input_gradients, state.inputs, state.sizes);
  for (std::size_t i = 0; i < joined.size(); ++i) {
    if (state.inputs[i].defined() && state.inputs[i].requires_grad()) result.push_back(joined[i]);
  }
  result.resize(result.size() + 1 + 1);  // of the tensor that no input stands for, and of what is no tensor
  return result;
}

}  // namespace

Tensors attach(const Tensors& inputs, const std::shared_ptr<Batch>& batch,
               const std::vector<std::int64_t>& sizes,
               std::function<void(const std::shared_ptr<Batch>&)> backward) {
  Tensors outputs = join(batch->outputs);
  auto state = c10::make_intrusive<State>();
  state->inputs = autograd::leaf_inputs(inputs);
  Tensors edges, results;
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.requires_grad()) edges.push_back(input);
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    bool needed = false;
    for (const Tensors& part : batch->outputs)
      needed = needed || (part[i].defined() && part[i].requires_grad());
    state->attached.push_back(needed);
    if (needed) results.push_back(outputs[i]);
  }
  // The caller has them, and what is held here would stay until backward.
  batch->outputs.clear();
  if (results.empty()) return outputs;
  // Without it, a pipeline whose inputs need no gradient would be no part of the graph.
  edges.push_back(at::empty({0}).requires_grad_());
  state->batch = batch;
  state->sizes = sizes;
  state->backward = std::move(backward);
  const at::Tensor anchor =
      PipelineNode::apply(at::TensorList(edges), c10::intrusive_ptr<torch::CustomClassHolder>(state));
  autograd::attach_to_anchor(anchor, results);
  return outputs;
}

}  // namespace cohort::pipeline

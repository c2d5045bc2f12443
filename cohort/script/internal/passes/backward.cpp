// The node of a recorded forward. The first backward that comes is recorded on the tape of forward, after
// its calls. It runs in the detached graph, and its gradients become the trace's. The trace then goes to the
// cache entry, or to a verification. Further backwards (retain_graph) run in the graph, and nothing is
// recorded. Always: the caller gets eager mode's gradients, also where the recording is rejected. Surprising:
// zeros may stand for missing gradients while it is recorded. If that throws, or gives inf or NaN, backward
// runs again with the gradients as they came.
#include "cohort/script/internal/passes/backward.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <functional>
#include <unordered_set>

#include "cohort/autograd/detached_graph.h"
#include "cohort/autograd/graph_walk.h"
#include "cohort/autograd/internal/recompute_node.h"
#include "cohort/base/error.h"
#include "cohort/core/torch_compat.h"
#include "cohort/script/internal/passes/gradients.h"
#include "cohort/script/internal/passes/joint.h"
#include "cohort/script/internal/record/recorder.h"
#include "cohort/script/internal/record/verify.h"

namespace cohort::script {
namespace {

using base::concat;
using torch::autograd::Edge;
using torch::autograd::Node;

constexpr const char* kWhereRecorded = "script.backward";

class RecordedBackward : public Node {
 public:
  RecordedForward forward;
  std::vector<at::TensorOptions> options;  // of the outputs that need a gradient
  std::vector<std::vector<std::int64_t>> sizes;
  std::vector<std::size_t> places;
  std::vector<std::vector<bool>> reached_from;

  Tensors apply(Tensors&& gradients) override;
  std::string name() const override { return "cohort::script::RecordedBackward"; }
  void will_release_variables() override { is_last_ = true; }
  void release_variables() override { forward.graph->release(); }

 private:
  Tensors run(const Tensors& grad_outputs);
  Tensors begin(const Tensors& grad_outputs);
  void forget();
  bool is_last_ = false;
  bool is_recorded_ = false;
};

// Takes the gradients of results down; returns what the recorded backward of a function begins with.
// Note [Gradients that do not fit]
Tensors RecordedBackward::begin(const Tensors& grad_outputs) {
  Trace& trace = *forward.trace;
  const std::size_t given =
      std::hash<std::vector<bool>>()(defined(grad_outputs)) | 1;  // 0: none was recorded
  const std::size_t before = forward.wants->given.exchange(given);
  if (before != 0 && before != given) forward.wants->all = true;
  const bool wants_all = !trace.may_run_again || forward.wants->all;
  Tensors starts = grad_outputs;
  for (std::size_t i = 0; i < starts.size(); ++i) {
    at::Tensor& grad_output = starts[i];
    if (!grad_output.defined()) {
      if (wants_all) grad_output = at::zeros(sizes[i], options[i]);
    } else {
      grad_output = materialized(grad_output);  // lazy and sparse ones may come to replays, or not
      // Each has a slot of its own: (a + b).backward() hands the same tensor on twice.
      if (trace.tape.knows_storage(grad_output)) grad_output = grad_output.clone();
      if (!trace.may_run_again && Layout::of(grad_output).may_overlap()) {
        grad_output = grad_output.clone(at::MemoryFormat::Contiguous);
      }
    }
    trace.grad_outputs.push_back(trace.tape.add_input(grad_output));
    if (grad_output.defined()) trace.grad_outputs_overlap |= Layout::of(grad_output).may_overlap();
  }
  return starts;
}

Tensors RecordedBackward::run(const Tensors& grad_outputs) {
  // Within another recording: these operators belong to that one's tape.
  if (Recording::is_active()) return forward.graph->backward(grad_outputs, !is_last_);
  const bool is_filled = has_implicit_zeros(grad_outputs);
  if (is_recorded_) {  // once more: its nodes get gradients of the layout that they got before
    Tensors dense = grad_outputs;
    for (at::Tensor& grad_output : dense) {
      if (grad_output.defined()) grad_output = materialized(grad_output);
    }
    Tensors found = forward.graph->backward(dense, !is_last_ || is_filled);
    if (is_filled && !all_finite(found)) return forward.graph->backward(grad_outputs, !is_last_);
    if (is_filled && is_last_) forward.graph->release();
    return found;
  }
  is_recorded_ = true;
  Trace& trace = *forward.trace;
  trace.split = trace.tape.calls().size();
  trace.has_backward = true;
  if (is_filled) forward.wants->zeros = true;
  const Tensors starts = begin(grad_outputs);
  if (forward.verify != nullptr) forward.verify->begin_backward();
  const bool has_zeros = is_filled || defined(starts) != defined(grad_outputs);
  Tensors found;
  try {
    const Recording recording(trace.tape);
    // With zeros among them the graph is kept, since a second run may need it.
    found = forward.graph->backward(starts, !is_last_ || has_zeros);
  } catch (const std::exception&) {
    if (!has_zeros) throw;  // zeros may have gone where backward has no business
    forget();
    return forward.graph->backward(grad_outputs, !is_last_);
  }
  Tensors gradients;
  for (const std::size_t place : places) {
    const int slot = trace.tape.find_result(found[place]);
    if (slot == kUnknown) trace.tape.mark_unsupported("backward returns a tensor that no operator made");
    trace.gradients.push_back(slot);
    gradients.push_back(found[place]);
  }
  trace.tape.check_versions();
  std::vector<int> leaves;
  for (const std::size_t place : places) {
    const bool is_input = place < trace.inputs.size();
    leaves.push_back(is_input ? trace.inputs[place]
                              : trace.tape.find(trace.leaves[place - trace.inputs.size()]));
  }
  trace.segments = cut_backward(trace, leaves, forward.gradient_chunk_bytes);
  if (forward.verify != nullptr) {
    forward.entry->compare(forward.verify->difference_in_backward(starts, gradients),
                           forward.verify->is_alone(trace.tape));
    if (forward.verify->takes(starts)) forward.entry->verify(std::move(trace));
  } else if (!trace.grad_outputs_overlap || !forward.wants->plain) {
    forward.entry->add_trace(std::move(trace));
  }
  forget();
  if (has_zeros && !all_finite(found)) return forward.graph->backward(grad_outputs, !is_last_);
  if (has_zeros && is_last_) forward.graph->release();
  return found;
}

// A trace is handed over once: a second backward must find none.
void RecordedBackward::forget() {
  forward.verify.reset();
  forward.trace.reset();
  forward.entry.reset();
}

Tensors RecordedBackward::apply(Tensors&& gradients) {
  check_no_graph("a scripted function");
  const std::vector<bool> is_given = defined(gradients);
  if (is_none(is_given)) return Tensors(places.size());
  Tensors found = run(gradients), result;
  for (std::size_t i = 0; i < places.size(); ++i) {
    result.push_back(is_reached(reached_from[i], is_given) ? std::move(found[places[i]]) : at::Tensor());
  }
  return result;
}

// A node that calls a function.
class FunctionNode : public Node {
 public:
  std::function<void()> fn;

  Tensors apply(Tensors&& /*gradients*/) override {
    fn();
    return {};
  }
  std::string name() const override { return "cohort::script::FunctionNode"; }
};

// Behind an AccumulateGrad there is nothing of the function's: one that stands for an input leads on.
template <typename Fn>
void each_node(Node* first, const Fn& fn) {
  autograd::GraphWalk walk;
  walk.add(first);
  while (Node* const node = walk.next()) {
    fn(*node);
    if (dynamic_cast<const torch::autograd::AccumulateGrad*>(node) == nullptr) walk.add_next_nodes(*node);
  }
}

}  // namespace

void run_where_backward_runs(c10::Device device, std::function<void()> fn) {
  if (device.is_cpu()) return fn();
  auto node = COHORT_MAKE_NODE(FunctionNode);
  node->fn = std::move(fn);
  // The engine runs a node on the thread of the device where the node's result lies.
  at::Tensor root = at::empty({}, at::TensorOptions(device));
  const at::Tensor gradient = root.detach();
  torch::autograd::set_history(root, node);
  torch::autograd::backward({root}, {gradient});
}

void check_no_graph(const char* what) {
  if (!at::GradMode::is_enabled()) return;
  throw UsageError(kWhereRecorded,
                   concat("backward with create_graph goes through ", what, ", which is cut off there"),
                   "the plain function where second derivatives are taken");
}

torch::autograd::edge_list edges_to(std::span<const at::Tensor> inputs, const Tensors& captured,
                                    std::vector<std::size_t>& places) {
  torch::autograd::edge_list edges;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
    edges.push_back(torch::autograd::impl::gradient_edge(inputs[i]));
    places.push_back(i);
  }
  for (std::size_t i = 0; i < captured.size(); ++i) {
    edges.push_back(torch::autograd::impl::gradient_edge(captured[i]));
    places.push_back(inputs.size() + i);
  }
  return edges;
}

void attach_recording(RecordedForward forward, const Tensors& inputs, Tensors& results) {
  auto node = COHORT_MAKE_NODE(RecordedBackward);
  auto edges = edges_to(inputs, forward.graph->captured(), node->places);
  node->reached_from = forward.trace->reached_from;
  const auto needs_gradient = forward.trace->needs_gradient;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!needs_gradient[i]) continue;
    node->options.push_back(results[i].options());
    node->sizes.push_back(results[i].sizes().vec());
  }
  node->forward = std::move(forward);
  if (node->forward.trace->reach_differs) {
    return join(whole(node), edges, node->reached_from, needs_gradient, results);
  }
  node->set_next_edges(std::move(edges));
  set_histories(results, needs_gradient, node);
}

std::vector<std::unordered_set<const c10::TensorImpl*>> leaves_reached_from(const Tensors& results) {
  std::vector<std::unordered_set<const c10::TensorImpl*>> found;
  for (const at::Tensor& result : results) {
    if (!autograd::needs_gradient(result)) continue;
    auto& leaves = found.emplace_back();
    each_node(torch::autograd::impl::gradient_edge(result).function.get(), [&](Node& node) {
      if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node)) {
        leaves.insert(leaf->variable.unsafeGetTensorImpl());
      }
    });
  }
  return found;
}

std::string unrecordable_within(const Tensors& results) {
  std::string reason;
  for (const at::Tensor& result : results) {
    if (!autograd::needs_gradient(result)) continue;
    each_node(torch::autograd::impl::gradient_edge(result).function.get(), [&](Node& node) {
      if (dynamic_cast<const torch::autograd::AccumulateGrad*>(&node) != nullptr || !reason.empty()) return;
      if (autograd::recompute_detail::is_recompute_node(node)) {
        reason = "autograd::recompute within the function sets the random generator, which is no operator";
        return;
      }
      // A replay has no such node, so its hooks would be left out in silence.
      if (node.tensor_pre_hooks().empty() && node.pre_hooks().empty() && node.post_hooks().empty()) return;
      reason = concat("a hook within the function (on a result of ", node.name(), ") would not run");
    });
  }
  return reason;
}

}  // namespace cohort::script

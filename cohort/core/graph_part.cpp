#include "cohort/core/graph_part.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <unordered_map>
#include <unordered_set>

#include "cohort/core/error.h"

namespace cohort::core {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using Tensors = GraphPart::Tensors;

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

std::string describe(const at::Tensor& tensor) {
  return concat(tensor.scalar_type(), tensor.sizes());
}

bool autocast_is_on() {
  return at::autocast::is_autocast_enabled(at::kCPU) || at::autocast::is_autocast_enabled(at::kCUDA);
}

// Copies those that share memory with an earlier one and are another tensor, and lie dense: what takes over a
// gradient as a grad() copies the others itself.
void tell_apart(Tensors& tensors) {
  std::unordered_map<const c10::StorageImpl*, const c10::TensorImpl*> first;
  for (at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.is_non_overlapping_and_dense())
      continue;
    const auto [known, is_new] =
        first.try_emplace(tensor.storage().unsafeGetStorageImpl(), tensor.unsafeGetTensorImpl());
    if (!is_new && known->second != tensor.unsafeGetTensorImpl()) tensor = tensor.clone();
  }
}

// Whether nobody else has the values of `tensor`, so that they may be changed.
bool is_alone(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

struct Entry : torch::autograd::Function<Entry> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& input) {
    return input.detach();
  }
  static Tensors backward(torch::autograd::AutogradContext* /*context*/, Tensors gradients) {
    return gradients;
  }
};

}  // namespace

bool needs_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() &&
         (!tensor.is_view() || torch::autograd::impl::gradient_edge(tensor).is_valid());
}

Edge edge_of(const at::Tensor& tensor) {
  return needs_gradient(tensor) ? torch::autograd::impl::gradient_edge(tensor) : Edge();
}

std::vector<Edge> edges_of(const Tensors& tensors) {
  std::vector<Edge> edges;
  edges.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) edges.push_back(edge_of(tensor));
  return edges;
}

Tensors leaves_of(const Tensors& tensors) {
  Tensors leaves;
  leaves.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    leaves.push_back(tensor.defined() ? tensor.detach().requires_grad_(tensor.requires_grad()) : tensor);
  }
  return leaves;
}

Tensors entered(const Tensors& leaves) {
  Tensors inputs;
  inputs.reserve(leaves.size());
  for (const at::Tensor& leaf : leaves) {
    inputs.push_back(leaf.defined() && leaf.requires_grad() ? Entry::apply(leaf) : leaf);
  }
  return inputs;
}

GraphPart::GraphPart(const Tensors& inputs, const Words& words)
    : words_(words), leaves_(leaves_of(inputs)), first_sequence_(at::sequence_number::peek()) {}

Tensors GraphPart::end(const Tensors& results) {
  Tensors cut;
  cut.reserve(results.size());
  for (const at::Tensor& result : results) {
    const bool needs = core::needs_gradient(result);
    needs_gradient_.push_back(needs);
    if (needs) results_.push_back(torch::autograd::impl::gradient_edge(result));
    cut.push_back(needs ? result.detach() : result);
  }
  inputs_ = edges_of(leaves_);
  if (!results_.empty()) find_captured();
  leaves_.clear();
  return cut;
}

// A node that another thread made, or that is older than this forward, belongs to a graph outside: backward
// would go through it, and free it, as if it were the part's own.
void GraphPart::find_captured() {
  std::unordered_set<const Node*> seen;
  std::vector<Node*> open;
  const auto visit = [&](const Edge& edge) {
    Node* const node = edge.function.get();
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  std::unordered_set<const Node*> own;
  for (const Edge& edge : inputs_) own.insert(edge.function.get());
  for (const Edge& edge : results_) visit(edge);
  const auto thread = at::RecordFunction::currentThreadId();
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    if (own.count(node) != 0) continue;
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
      captured_.push_back(leaf->variable);
      versions_.push_back(version_of(leaf->variable));
      continue;
    }
    const bool outside = node->thread_id() != thread || node->sequence_nr() < first_sequence_;
    // Autocast keeps its casts of parameters for the rest of its scope, whichever thread made them.
    const bool kept_cast = autocast_is_on() && node->name() == "ToCopyBackward0";
    if (outside && !kept_cast) {
      throw UsageError(
          words_.where,
          concat("fn uses a tensor with a graph of its own (", node->name(), ") that is not an input"),
          words_.as_input);
    }
    for (const Edge& edge : node->next_edges()) visit(edge);
  }
}

void GraphPart::check_captured() const {
  for (std::size_t i = 0; i < captured_.size(); ++i) {
    if (version_of(captured_[i]) != versions_[i]) {
      throw UsageError(words_.where,
                       concat("a parameter ", describe(captured_[i]), " that fn uses was changed between ",
                              words_.between),
                       "step the optimizer after backward");
    }
  }
}

Tensors GraphPart::backward(const Tensors& gradients, bool keep_graph, const std::vector<bool>& wanted) {
  if (released_) {
    throw UsageError(words_.where, "a second backward goes through a part whose graph has been freed",
                     "backward() with retain_graph the first time");
  }
  check_captured();
  std::vector<Edge> roots, ends;
  Tensors root_gradients;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    roots.push_back(results_[i]);
    root_gradients.push_back(gradients[i]);
  }
  Tensors all(inputs_.size() + captured_.size());
  std::vector<std::size_t> places;
  const auto want = [&](std::size_t place, const Edge& edge) {
    if (!edge.is_valid() || (!wanted.empty() && !wanted[place])) return;
    places.push_back(place);
    ends.push_back(edge);
  };
  for (std::size_t i = 0; i < inputs_.size(); ++i) want(i, inputs_[i]);
  for (std::size_t i = 0; i < captured_.size(); ++i) {
    want(inputs_.size() + i, torch::autograd::impl::gradient_edge(captured_[i]));
  }
  if (!roots.empty() && !ends.empty()) {
    const HooksAside aside(captured_);
    Tensors found = torch::autograd::Engine::get_default_engine().execute(
        roots, root_gradients, keep_graph, /*create_graph=*/false, /*accumulate_grad=*/false, ends);
    tell_apart(found);
    for (std::size_t i = 0; i < places.size(); ++i) all[places[i]] = std::move(found[i]);
  }
  if (!keep_graph) release();
  return all;
}

void GraphPart::release() {
  released_ = true;
  results_.clear();
  inputs_.assign(inputs_.size(), Edge());
}

struct HooksAside::Impl {
  using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;
  std::vector<std::pair<at::Tensor, Hooks>> saved;
};

HooksAside::HooksAside(Tensors leaves) : impl_(std::make_unique<Impl>()) {
  for (at::Tensor& leaf : leaves) {
    auto& hooks = torch::autograd::impl::hooks(leaf);
    if (hooks.empty()) continue;
    Impl::Hooks own;
    own.swap(hooks);
    impl_->saved.emplace_back(std::move(leaf), std::move(own));
  }
}

HooksAside::~HooksAside() {
  for (auto& [leaf, hooks] : impl_->saved) torch::autograd::impl::hooks(leaf).swap(hooks);
}

at::Tensor as_own(at::Tensor tensor) {
  const bool is_shared = tensor.defined() && tensor.layout() == at::kStrided && !is_alone(tensor);
  return is_shared ? tensor.clone() : tensor;
}

at::Tensor sum_in_pairs(Tensors values) {
  std::erase_if(values, [](const at::Tensor& value) { return !value.defined(); });
  if (values.empty()) return {};
  for (std::size_t step = 1; step < values.size(); step *= 2) {
    for (std::size_t i = 0; i + step < values.size(); i += 2 * step) {
      at::Tensor other = std::move(values[i + step]);
      if (other.device() != values[i].device()) other = other.to(values[i].device());
      if (is_alone(values[i]) && values[i].is_non_overlapping_and_dense() && other.layout() == at::kStrided) {
        values[i].add_(other);
      } else {
        values[i] = at::add(values[i], other);
      }
    }
  }
  return std::move(values.front());
}

}  // namespace cohort::core

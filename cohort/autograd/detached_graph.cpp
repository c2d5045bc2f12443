// Inputs are replaced by leaves, whose nodes (Entrance) begin the part. end() walks from the results through
// the graph. It leads each edge to a captured leaf to a node of the part instead (Exit). backward() has
// LibTorch's engine run from results to entrances and exits, and captures the gradients there. Always: every
// node of the walk was made by this thread since the part began, but leaves and casts that autocast keeps.
// Any other node is rejected before an edge is changed, as backward would go through another graph and free
// it.
#include "cohort/autograd/detached_graph.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <limits>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "cohort/autograd/boundary_node.h"
#include "cohort/autograd/graph_walk.h"
#include "cohort/autograd/scoped_version_counter.h"
#include "cohort/base/error.h"
#include "cohort/core/torch_compat.h"

namespace cohort::autograd {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using Tensors = DetachedGraph::Tensors;

bool autocast_is_on() {
  return at::autocast::is_autocast_enabled(at::kCPU) || at::autocast::is_autocast_enabled(at::kCUDA);
}

// Copies each dense tensor that shares memory with an earlier, other tensor. A tensor that is not dense is
// copied by what takes it over as a grad().
void copy_aliases(Tensors& tensors) {
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

struct NonLeafProxy : torch::autograd::Function<NonLeafProxy> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& input) {
    return input.detach();
  }
  static Tensors backward(torch::autograd::AutogradContext* /*context*/, Tensors gradients) {
    return gradients;
  }
};

// Has `node` expect what another one does, of the same stream. Metadata can be copied and not assigned.
void take_metadata(Node& node, const torch::autograd::InputMetadata& metadata) {
  auto& own = node.mutable_input_metadata(node.add_input_metadata(Node::undefined_input()));
  std::destroy_at(&own);
  std::construct_at(&own, metadata);
}

// Note [Exits]
// The backward of a part ends at the leaves that the part captured. Their hooks belong to the graph in which
// the gradients continue, so they must not run here. LibTorch's engine calls them wherever it captures the
// gradient of a leaf. Taking them off for the time of a backward is no answer: another thread may go backward
// through the same leaf, within a part or not, and would miss them.
// So end() has the part's own nodes lead to a node of the part, an exit, and backward() captures gradients
// there. An exit hands on what it gets: a backward that reaches it by another way, from a tensor that fn put
// aside, continues to the leaf, hooks included. What several parts share is not written to.
struct Exit : torch::autograd::Node {
  Exit() : Node(/*sequence_nr=*/std::numeric_limits<std::uint64_t>::max()) {}  // as a leaf's node
  void lead_to(const Edge& edge) {
    take_metadata(*this, edge.function->input_metadata(edge.input_nr));
    // Not set_next_edge(): the engine prunes by heights of nodes, and this one stands in for a leaf.
    next_edges().push_back(edge);
  }
  Tensors apply(Tensors&& gradients) override { return std::move(gradients); }
  std::string name() const override { return "cohort::autograd::Exit"; }
};

// In place of the AccumulateGrad of a leaf that stands for an input. A backward of the part ends there.
// Another one, from a tensor that fn put aside, continues to the input's own graph, or throws, as
// ForeignBackward says: in the leaf's grad() the gradient would be lost without a word.
struct Entrance : torch::autograd::AccumulateGrad {
  Entrance(const at::Tensor& leaf, const Edge& before, bool throws, const char* where)
      : AccumulateGrad(leaf), throws_(throws), where_(where) {
    if (before.is_valid()) add_next_edge(before);
  }
  Tensors apply(Tensors&& gradients) override {
    if (!next_edges().empty()) return std::move(gradients);
    if (!throws_) return {};  // a view that was taken without gradients: its history leads nowhere
    throw UsageError(where_, "a backward from a tensor that fn put aside reaches an input of fn",
                     "the tensor as a result of fn, or its detach()");
  }
  std::string name() const override { return "cohort::autograd::Entrance"; }

 private:
  const bool throws_;
  const char* const where_;
};

// Stands for the backward of a cast of a leaf that autocast keeps, and that other parts use too.
struct Cast : torch::autograd::Node {
  void stand_for(const Node& cast, const Edge& exit) {
    take_metadata(*this, cast.input_metadata(0));
    set_sequence_nr(cast.sequence_nr());  // the order in which gradients are added up
    add_next_edge(exit);
  }
  Tensors apply(Tensors&& gradients) override {
    at::Tensor& gradient = gradients.front();
    if (gradient.defined()) gradient = gradient.to(next_edge(0).function->input_metadata(0).options());
    return std::move(gradients);
  }
  std::string name() const override { return "cohort::autograd::Cast"; }
};

const torch::autograd::AccumulateGrad* as_leaf(const Node* node) {
  return dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
}

bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty();
}

// Where the cast `node` of a leaf leads to; invalid if it is none that autocast may keep. Casts that have
// hooks are somebody else's.
Edge leaf_of_kept_cast(Node& node) {
  if (!autocast_is_on() || node.next_edges().size() != 1) return {};
  Edge edge = node.next_edge(0);
  if (dynamic_cast<const Exit*>(edge.function.get()) != nullptr) edge = edge.function->next_edge(0);
  const bool is_cast = as_leaf(edge.function.get()) != nullptr && node.name() == "ToCopyBackward0";
  return is_cast && !has_hooks(node) ? edge : Edge();
}

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

Tensors leaf_inputs(const Tensors& tensors) {
  Tensors leaves;
  leaves.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    leaves.push_back(tensor.defined() ? tensor.detach().requires_grad_(tensor.requires_grad()) : tensor);
  }
  return leaves;
}

Tensors non_leaf_proxies(const Tensors& leaves) {
  Tensors inputs;
  inputs.reserve(leaves.size());
  for (const at::Tensor& leaf : leaves) {
    inputs.push_back(leaf.defined() && leaf.requires_grad() ? NonLeafProxy::apply(leaf) : leaf);
  }
  return inputs;
}

DetachedGraph::DetachedGraph(const Tensors& inputs, const Words& words, ForeignBackward foreign_backward)
    : words_(words), leaves_(leaf_inputs(inputs)), first_sequence_(at::sequence_number::peek()) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& leaf = leaves_[i];
    Edge& edge = inputs_.emplace_back();
    if (!autograd::needs_gradient(leaf)) continue;
    const bool throws = foreign_backward == ForeignBackward::kThrows;
    const Edge before = throws ? Edge() : edge_of(inputs[i]);
    const auto entrance = COHORT_MAKE_NODE(Entrance, leaf, before, throws, words_.where);
    torch::autograd::impl::set_grad_accumulator(leaf, COHORT_WEAK_NODE(entrance));
    edge = Edge(entrance, 0);
  }
}

// From results to where the part ends. A node that another thread made, or that is older than the forward, is
// outside: it belongs to another graph, and backward would go through it, and free it, as if it were the
// part's own.
class DetachedGraph::Walk {
 public:
  Walk(const std::vector<Edge>& inputs, std::uint64_t first_sequence) : first_sequence_(first_sequence) {
    for (const Edge& edge : inputs) inputs_.insert(edge.function.get());
  }

  // Calls visit(edge) for every edge of the part, those that leave it included, and for `roots`; where that
  // returns true, continues after it.
  template <typename Fn>
  void run(std::vector<Edge>& roots, const Fn& visit) {
    const auto visit_edge = [&](Edge& edge) {
      if (Node* const node = edge.function.get(); node != nullptr && visit(edge)) {
        walk_.add(node);
      }
    };
    for (Edge& edge : roots) visit_edge(edge);
    while (Node* const node = walk_.next()) {
      for (Edge& edge : node->next_edges()) visit_edge(edge);
      nodes_.push_back(node);
    }
  }
  const std::vector<Node*>& nodes() const { return nodes_; }
  bool is_input(const Node* node) const { return inputs_.count(node) != 0; }
  // Where a cast leads to that autocast may keep for others too; invalid for other nodes.
  Edge leaf_of_kept_cast(Node& node) const {
    Edge leaf = autograd::leaf_of_kept_cast(node);
    return is_input(leaf.function.get()) ? Edge() : leaf;
  }
  bool is_outside(const Node& node) const {
    if (const auto* const boundary = dynamic_cast<const BoundaryNode*>(&node)) {
      const MadeBy& made_by = boundary->made_by();
      return made_by.thread != thread_ || made_by.sequence_nr < first_sequence_;
    }
    return node.thread_id() != thread_ || node.sequence_nr() < first_sequence_;
  }

 private:
  const std::uint64_t thread_ = at::RecordFunction::currentThreadId();
  const std::uint64_t first_sequence_;
  std::unordered_set<const Node*> inputs_;
  GraphWalk walk_;
  std::vector<Node*> nodes_;
};

std::string DetachedGraph::outside(const Tensors& results) const {
  std::vector<Edge> roots = edges_of(results);
  Walk walk(inputs_, first_sequence_);
  std::string name;
  walk.run(roots, [&](const Edge& edge) {
    Node& node = *edge.function;
    if (!name.empty() || walk.is_input(&node) || as_leaf(&node) != nullptr) return false;
    if (walk.leaf_of_kept_cast(node).is_valid()) return false;
    if (!walk.is_outside(node)) return true;
    name = node.name();
    return false;
  });
  return name;
}

void DetachedGraph::make_exits() {
  Walk walk(inputs_, first_sequence_);
  std::map<std::pair<const Node*, std::uint32_t>, Edge> exits;
  const auto exit_to = [&](const Edge& edge) {
    Edge& exit = exits[{edge.function.get(), edge.input_nr}];
    if (exit.is_valid()) return exit;
    auto node = COHORT_MAKE_NODE(Exit);
    node->lead_to(edge);
    exit = Edge(node, 0);
    const at::Tensor& leaf = as_leaf(edge.function.get())->variable;
    captured_.push_back(leaf);
    versions_.push_back(version_of(leaf));
    exits_.push_back(exit);
    return exit;
  };
  // The graph is written to only when all has been found to be right.
  std::vector<std::pair<Edge*, Edge>> changes;
  walk.run(results_, [&](Edge& edge) {
    Node& node = *edge.function;
    if (walk.is_input(&node)) return false;
    if (as_leaf(&node) != nullptr) {
      changes.emplace_back(&edge, exit_to(edge));
      return false;
    }
    if (const Edge leaf = walk.leaf_of_kept_cast(node); leaf.is_valid()) {
      Edge& cast = exits[{&node, edge.input_nr}];
      if (!cast.is_valid()) {
        auto own = COHORT_MAKE_NODE(Cast);
        own->stand_for(node, exit_to(leaf));
        cast = Edge(own, 0);
      }
      changes.emplace_back(&edge, cast);
      return false;
    }
    if (!walk.is_outside(node)) return true;
    throw UsageError(
        words_.where,
        base::concat("fn uses a tensor with a graph of its own (", node.name(), ") that is not an input"),
        words_.as_input);
  });
  for (const auto& [edge, exit] : changes) *edge = exit;
  // A write to a view is a node within a node, which asks which gradients are wanted of its own edges.
  for (Node* const node : walk.nodes()) {
    auto* const write = dynamic_cast<torch::autograd::CopySlices*>(node);
    if (write == nullptr || write->fn == nullptr) continue;
    for (Edge& edge : write->fn->next_edges()) {
      if (const auto found = exits.find({edge.function.get(), edge.input_nr}); found != exits.end()) {
        edge = found->second;
      }
    }
  }
}

Tensors DetachedGraph::end(const Tensors& results) {
  Tensors cut;
  cut.reserve(results.size());
  for (const at::Tensor& result : results) {
    const bool needs = autograd::needs_gradient(result);
    needs_gradient_.push_back(needs);
    if (needs) results_.push_back(torch::autograd::impl::gradient_edge(result));
    cut.push_back(needs ? result.detach() : result);
  }
  leaves_.clear();
  make_exits();
  return cut;
}

void DetachedGraph::check_captured() const {
  if (words_.between == nullptr) return;
  for (std::size_t i = 0; i < captured_.size(); ++i) {
    if (version_of(captured_[i]) != versions_[i]) {
      throw UsageError(words_.where,
                       base::concat("a parameter ", captured_[i].scalar_type(), captured_[i].sizes(),
                                    " that fn uses was changed between ", words_.between),
                       "step the optimizer after backward");
    }
  }
}

Tensors DetachedGraph::backward(const Tensors& gradients, bool keep_graph, const std::vector<bool>& wanted) {
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
  Tensors all(inputs_.size() + exits_.size());
  std::vector<std::size_t> places;
  const auto want = [&](std::size_t place, const Edge& edge) {
    if (!edge.is_valid() || (!wanted.empty() && !wanted[place])) return;
    places.push_back(place);
    ends.push_back(edge);
  };
  for (std::size_t i = 0; i < inputs_.size(); ++i) want(i, inputs_[i]);
  for (std::size_t i = 0; i < exits_.size(); ++i) want(inputs_.size() + i, exits_[i]);
  if (!roots.empty() && !ends.empty()) {
    Tensors found = torch::autograd::Engine::get_default_engine().execute(
        roots, root_gradients, keep_graph, /*create_graph=*/false, /*accumulate_grad=*/false, ends);
    copy_aliases(found);
    for (std::size_t i = 0; i < places.size(); ++i) all[places[i]] = std::move(found[i]);
  }
  if (!keep_graph) release();
  return all;
}

void DetachedGraph::release() {
  released_ = true;
  results_.clear();
  inputs_.assign(inputs_.size(), Edge());
  exits_.assign(exits_.size(), Edge());
}

at::Tensor clone_if_shared(at::Tensor tensor) {
  const bool is_shared = tensor.defined() && tensor.layout() == at::kStrided && !is_alone(tensor);
  return is_shared ? tensor.clone() : tensor;
}

// LibTorch adds a sparse tensor to a dense one, but not a dense tensor to a sparse one. The bits are the
// same.
at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  if (a.layout() == b.layout() || a.layout() == at::kStrided) return at::add(a, b);
  return at::add(b.layout() == at::kStrided ? b : b.to_dense(), a);
}

at::Tensor pairwise_sum(Tensors values) {
  std::erase_if(values, [](const at::Tensor& value) { return !value.defined(); });
  if (values.empty()) return {};
  for (std::size_t step = 1; step < values.size(); step *= 2) {
    for (std::size_t i = 0; i + step < values.size(); i += 2 * step) {
      at::Tensor other = std::move(values[i + step]);
      if (other.device() != values[i].device()) other = other.to(values[i].device());
      const bool is_writable =
          is_alone(values[i]) && values[i].is_non_overlapping_and_dense() && !values[i]._is_zerotensor();
      if (is_writable && other.layout() == at::kStrided) {
        values[i].add_(other);
      } else {
        values[i] = sum_of(values[i], other);
      }
    }
  }
  return std::move(values.front());
}

}  // namespace cohort::autograd

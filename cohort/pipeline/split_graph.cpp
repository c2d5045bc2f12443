// The first pass goes to the leaves alone, and hooks keep the gradients that arrive at nodes which also have
// weights. Those nodes are then cut off from the rest, and the second pass begins at all of them at once.
// Each gradient of a parameter is computed in a single half, so the halves together have the bits of a whole
// backward. Operators that compute all gradients at once are not worth two passes; see Note [How a graph is
// split].
#include "cohort/pipeline/split_graph.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>

#include "cohort/autograd/detached_graph.h"
#include "cohort/autograd/graph_walk.h"

namespace cohort::pipeline {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using Nodes = std::unordered_set<const Node*>;

// Note [How a graph is split]
// A node *reaches a leaf* when its edges lead to one, directly or through other nodes. A convolution that
// reaches a leaf has an edge towards it, and edges to its weight and bias, which end there. The first pass
// asks the engine for the gradients of the leaves alone, so that every operator computes no more than these
// need, and a hook keeps what such nodes are given. Then their edges towards leaves are removed. What is left
// is a graph of each node by itself, down to its weights, and the second pass begins at all of them at once.
// (torch.distributed.pipelining begins at one after the other, and stops each at the next by a hook.)
//
// A node that reaches no leaf runs in one half: either every parameter below it is for the second half, or
// none. A node that is cut runs in both, which a post hook would see; and a write to a view is a node within
// a node, whose edges must stay those of the outer one. A graph that has one of these there is not split: the
// first half is a whole backward.
//
// That pays where an operator computes both gradients by kernels of their own. Others (norms, an addition
// that is broadcast, a Function of one's own) would go through their inputs twice, so the gradients of
// parameters that only they use come with the first pass, and are added in the second.
constexpr std::array<std::string_view, 7> kApart{
    "ConvolutionBackward0", "AddmmBackward0",  "MmBackward0",    "BmmBackward0",
    "BaddbmmBackward0",     "LinearBackward0", "AddbmmBackward0"};

// Functions whose backward was registered as splittable.
struct SplittableRegistry {
  std::mutex mutex;
  std::unordered_set<std::type_index> types;  // under mutex

  static SplittableRegistry& get() {
    static SplittableRegistry registry;
    return registry;
  }
};

bool is_splittable(const Node& node) {
  const std::string name = node.name();
  if (std::find(kApart.begin(), kApart.end(), name) != kApart.end()) return true;
  const std::lock_guard lock(SplittableRegistry::get().mutex);
  return SplittableRegistry::get().types.count(typeid(node)) != 0;
}

bool is_parameter(const Node& node) {
  return dynamic_cast<const torch::autograd::AccumulateGrad*>(&node) != nullptr;
}

// Those of `order` from which one of `ends` is reached, and these.
Nodes leading_to(const std::vector<Node*>& order, Nodes ends) {
  for (const Node* node : order) {
    for (const Edge& edge : node->next_edges()) {
      if (ends.count(edge.function.get()) != 0) ends.insert(node);
    }
  }
  return ends;
}

Tensors run(const std::vector<Edge>& roots, const Tensors& gradients, bool again, bool accumulate,
            const std::vector<Edge>& ends) {
  return torch::autograd::Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/again,
                                                               /*create_graph=*/false, accumulate, ends);
}

// Keeps what a node's operator is given.
struct Catch : torch::autograd::FunctionPreHook {
  explicit Catch(Tensors& caught) : caught_(caught) {}
  Tensors operator()(const Tensors& gradients) override { return caught_ = gradients; }
  Tensors& caught_;
};

// What of a graph belongs to which half.
class Halves {
 public:
  Halves(const std::vector<Edge>& roots, const std::vector<Edge>& leaves)
      : order_(autograd::nodes_in_post_order(roots)) {
    for (const Edge& leaf : leaves) {
      if (leaf.is_valid()) leaves_.insert(leaf.function.get());
    }
    reaching_leaves_ = leading_to(order_, leaves_);
    const Nodes later = with_all_beside(parameters_for_later(roots));
    to_later_ = leading_to(order_, later);
    for (Node* node : order_) {
      if (is_leaf(node)) continue;
      if (is_parameter(*node)) (later.count(node) != 0 ? second_ : first_).emplace_back(node->getptr(), 0);
      if (reaching_leaves_.count(node) != 0 && has_more_to_do(*node)) cut_.push_back(node->getptr());
    }
  }

  bool reaches_leaf(const Edge& edge) const { return reaching_leaves_.count(edge.function.get()) != 0; }
  // Parameters whose gradients come with the first half, and with the second.
  const std::vector<Edge>& first() const { return first_; }
  const std::vector<Edge>& second() const { return second_; }
  // Nodes that reach a leaf, at which the second half begins.
  const std::vector<c10::intrusive_ptr<Node>>& cut() const { return cut_; }
  // Whether a node that would run twice may not.
  bool must_run_once() const {
    return std::ranges::any_of(cut_, [](const auto& node) {
      return !node->post_hooks().empty() || dynamic_cast<torch::autograd::CopySlices*>(node.get()) != nullptr;
    });
  }

  // Leaves of the graph what the second half has to do. What was caught at nodes that are cut has met their
  // hooks. An operator keeps its inputs with their graphs, so taking edges off would free nothing.
  void keep_second_half() const {
    for (Node* node : order_) {
      if (reaching_leaves_.count(node) != 0 ? !has_more_to_do(*node) : to_later_.count(node) == 0) {
        node->release_variables();
      }
    }
    for (const auto& node : cut_) {
      for (Edge& edge : node->next_edges()) {
        if (!is_for_later(edge)) edge = Edge();
      }
      node->tensor_pre_hooks().clear();
      node->retains_grad_hooks().clear();
      node->pre_hooks().clear();
    }
  }

 private:
  bool is_leaf(const Node* node) const { return leaves_.count(node) != 0; }
  bool is_for_later(const Edge& edge) const {
    return !reaches_leaf(edge) && to_later_.count(edge.function.get()) != 0;
  }
  bool has_more_to_do(const Node& node) const {
    const auto& edges = node.next_edges();
    return std::any_of(edges.begin(), edges.end(), [this](const Edge& edge) { return is_for_later(edge); });
  }

  // Those below an operator that can be split, or where nothing reaches a leaf; and those with hooks, which
  // are to run once.
  Nodes parameters_for_later(const std::vector<Edge>& roots) const {
    autograd::GraphWalk walk;
    const auto add = [&](const Edge& edge) {
      if (edge.is_valid() && !reaches_leaf(edge)) walk.add(edge.function.get());
    };
    for (const Edge& root : roots) add(root);
    for (const Node* node : order_) {
      if (is_leaf(node) || reaching_leaves_.count(node) == 0 || !is_splittable(*node)) continue;
      for (const Edge& edge : node->next_edges()) add(edge);
    }
    Nodes later;
    while (const Node* const node = walk.next()) {
      if (is_parameter(*node)) later.insert(node);
      walk.add_next_nodes(*node);
    }
    for (Node* node : order_) {
      if (!is_leaf(node) && is_parameter(*node) && !node->tensor_pre_hooks().empty()) later.insert(node);
    }
    return later;
  }

  // And all parameters below nodes that reach no leaf, and from which one of these is reached.
  Nodes with_all_beside(Nodes later) const {
    for (std::size_t before = 0; before != later.size();) {
      before = later.size();
      Nodes below = leading_to(order_, later);
      std::erase_if(below, [this](const Node* node) { return reaching_leaves_.count(node) != 0; });
      for (auto node = order_.rbegin(); node != order_.rend(); ++node) {  // those above before those below
        if (below.count(*node) == 0) continue;
        if (is_parameter(**node)) later.insert(*node);
        for (const Edge& edge : (*node)->next_edges()) {
          if (edge.is_valid()) below.insert(edge.function.get());
        }
      }
    }
    return later;
  }

  std::vector<Node*> order_;
  Nodes leaves_, reaching_leaves_, to_later_;
  std::vector<Edge> first_, second_;
  std::vector<c10::intrusive_ptr<Node>> cut_;
};

}  // namespace

void register_splittable_node(std::type_index node) {
  const std::lock_guard lock(SplittableRegistry::get().mutex);
  SplittableRegistry::get().types.insert(node);
}

void SplitGraph::Roots::add(const Edge& edge, const at::Tensor& gradient) {
  if (!edge.is_valid() || !gradient.defined()) return;
  edges.push_back(edge);
  gradients.push_back(gradient);
}

SplitGraph::SplitGraph(const Tensors& outputs, const Tensors& leaves)
    : outputs_(autograd::edges_of(outputs)), leaves_(autograd::edges_of(leaves)) {}

// A whole backward, which adds to the leaves' and the parameters' grad().
Tensors SplitGraph::all_gradients(const Roots& roots) {
  run(roots.edges, roots.gradients, /*again=*/false, /*accumulate=*/true, {});
  Tensors result;
  for (const Edge& edge : leaves_) {
    result.emplace_back();
    if (!edge.is_valid()) continue;
    auto& leaf = dynamic_cast<torch::autograd::AccumulateGrad&>(*edge.function);
    result.back() = autograd::clone_if_shared(std::move(leaf.variable.mutable_grad()));
  }
  *this = SplitGraph();
  return result;
}

Tensors SplitGraph::input_gradients(Tensors gradients) {
  Roots roots;
  for (std::size_t i = 0; i < outputs_.size(); ++i) roots.add(outputs_[i], gradients[i]);
  outputs_.clear();
  gradients.clear();
  const Halves halves(roots.edges, leaves_);
  if (halves.must_run_once()) return all_gradients(roots);
  Edges wanted;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    if (!leaves_[i].is_valid()) continue;
    places.push_back(i);
    wanted.push_back(leaves_[i]);
  }
  wanted.insert(wanted.end(), halves.first().begin(), halves.first().end());
  for (std::size_t i = 0; i < roots.edges.size(); ++i) {
    if (!halves.reaches_leaf(roots.edges[i])) later_.add(roots.edges[i], roots.gradients[i]);
  }
  weights_ = halves.first();
  weights_.insert(weights_.end(), halves.second().begin(), halves.second().end());

  Tensors result(leaves_.size());
  leaves_.clear();
  const bool has_first = std::any_of(roots.edges.begin(), roots.edges.end(),
                                     [&](const Edge& root) { return halves.reaches_leaf(root); });
  if (!has_first) return result;
  std::vector<Tensors> caught(halves.cut().size());
  for (std::size_t i = 0; i < caught.size(); ++i) {
    halves.cut()[i]->add_pre_hook(std::make_unique<Catch>(caught[i]));
  }
  Tensors found = run(roots.edges, roots.gradients, /*again=*/true, /*accumulate=*/false, wanted);
  roots.gradients.clear();  // the edges hold the graph until it is cut
  for (std::size_t i = places.size(); i < found.size(); ++i) later_.add(wanted[i], found[i]);
  found.resize(places.size());
  for (std::size_t i = 0; i < caught.size(); ++i) {
    for (std::uint32_t k = 0; k < caught[i].size(); ++k) later_.add({halves.cut()[i], k}, caught[i][k]);
  }
  caught.clear();
  for (std::size_t i = 0; i < places.size(); ++i)
    result[places[i]] = autograd::clone_if_shared(std::move(found[i]));
  halves.keep_second_half();
  return result;
}

void SplitGraph::weight_gradients() {
  if (!later_.edges.empty() && !weights_.empty()) {
    run(later_.edges, later_.gradients, /*again=*/false, /*accumulate=*/true, weights_);
  }
  *this = SplitGraph();
}

}  // namespace cohort::pipeline

#pragma once

#include <torch/csrc/autograd/function.h>

#include <unordered_set>
#include <vector>

namespace cohort::autograd {

/// The nodes of an autograd graph, each once, in no order that one may rely on.
///
///     autograd::GraphWalk walk;
///     walk.add(loss.grad_fn().get());
///     while (autograd::GraphWalk::Node* const node = walk.next()) {
///       ...
///       walk.add_next_nodes(*node);        // or only those after which there is something to find
///     }
///
/// Ownership: the graph must live on. Threads: one caller at a time.
class GraphWalk {
 public:
  using Node = torch::autograd::Node;

  /// Has next() return `node`, unless it was added before. A null pointer is no node.
  void add(Node* node) {
    if (node != nullptr && seen_.insert(node).second) open_.push_back(node);
  }
  /// Adds the nodes that gradients of `node` go to.
  void add_next_nodes(const Node& node) {
    for (const torch::autograd::Edge& edge : node.next_edges()) add(edge.function.get());
  }

  /// Returns a node that was added, or null, where each was returned.
  Node* next() {
    if (open_.empty()) return nullptr;
    Node* const node = open_.back();
    open_.pop_back();
    return node;
  }

 private:
  std::unordered_set<const Node*> seen_;
  std::vector<Node*> open_;
};

/// Returns every node that is reached from `roots`, after those that are reached from it.
std::vector<torch::autograd::Node*> nodes_in_post_order(const std::vector<torch::autograd::Edge>& roots);

}  // namespace cohort::autograd

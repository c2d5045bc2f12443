#include "cohort/autograd/graph_walk.h"

namespace cohort::autograd {

using torch::autograd::Edge;
using torch::autograd::Node;

std::vector<Node*> nodes_in_post_order(const std::vector<Edge>& roots) {
  struct Frame {
    Node* node;
    std::size_t next = 0;
  };
  // A graph may be deeper than a thread's stack, so without recursion.
  std::vector<Node*> order;
  std::vector<Frame> open;
  std::unordered_set<const Node*> seen;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back({node});
  };
  for (const Edge& root : roots) {
    visit(root.function.get());
    while (!open.empty()) {
      Frame& frame = open.back();
      if (frame.next < frame.node->num_outputs()) {
        visit(frame.node->next_edge(frame.next++).function.get());
      } else {
        order.push_back(frame.node);
        open.pop_back();
      }
    }
  }
  return order;
}

}  // namespace cohort::autograd

#include "cohort/autograd/graph_walk.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace cohort::autograd {
namespace {

TEST(GraphWalkTest, EachNodeComesOnceAlsoWhereWaysMeet) {
  const at::Tensor x = at::ones({2}).set_requires_grad(true);
  const at::Tensor shared = x.exp();
  const at::Tensor y = shared * shared + shared.sin();
  GraphWalk walk;
  walk.add(y.grad_fn().get());
  walk.add(y.grad_fn().get());
  walk.add(nullptr);
  std::map<std::string, int> count;
  while (torch::autograd::Node* const node = walk.next()) {
    ++count[node->name()];
    walk.add_next_nodes(*node);
  }
  EXPECT_EQ(count, (std::map<std::string, int>{{"AddBackward0", 1},
                                               {"MulBackward0", 1},
                                               {"SinBackward0", 1},
                                               {"ExpBackward0", 1},
                                               {"torch::autograd::AccumulateGrad", 1}}));
}

TEST(GraphWalkTest, TheNextNodesComeOnlyIfTheyAreAdded) {
  const at::Tensor x = at::ones({2}).set_requires_grad(true);
  const at::Tensor y = x.exp().sin();
  GraphWalk walk;
  walk.add(y.grad_fn().get());
  EXPECT_EQ(walk.next(), y.grad_fn().get());
  EXPECT_EQ(walk.next(), nullptr);
  walk.add_next_nodes(*y.grad_fn());
  EXPECT_EQ(walk.next()->name(), "ExpBackward0");
  EXPECT_EQ(walk.next(), nullptr);
}

std::vector<torch::autograd::Edge> roots_of(const at::Tensor& first, const at::Tensor& second) {
  return {{first.grad_fn(), 0}, {}, {second.grad_fn(), 0}};  // an edge that leads nowhere too
}

TEST(GraphWalkTest, InPostOrderEachNodeComesOnceAfterThoseItsGradientsGoTo) {
  const at::Tensor x = at::ones({2}).set_requires_grad(true);
  const at::Tensor shared = x.exp();
  // The multiplication leads to `shared` at once, and by way of the sine.
  const at::Tensor product = shared * shared.sin();
  const at::Tensor sum = product + shared;
  const auto order = nodes_in_post_order(roots_of(product, sum));
  std::map<const torch::autograd::Node*, std::size_t> places;
  for (std::size_t i = 0; i < order.size(); ++i) {
    EXPECT_TRUE(places.emplace(order[i], i).second) << order[i]->name() << " came twice";
  }
  EXPECT_EQ(order.size(), 5u);
  EXPECT_EQ(order.back(), sum.grad_fn().get());
  for (const torch::autograd::Node* node : order) {
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      EXPECT_LT(places.at(edge.function.get()), places.at(node)) << node->name();
    }
  }
}

TEST(GraphWalkTest, AGraphIsOrderedThatIsDeeperThanAStack) {
  constexpr int kDepth = 200000;
  at::Tensor y = at::ones({1}).set_requires_grad(true);
  for (int i = 0; i < kDepth; ++i) y = y.neg();
  const auto order = nodes_in_post_order({{y.grad_fn(), 0}});
  EXPECT_EQ(order.size(), kDepth + 1u);
  EXPECT_EQ(order.back(), y.grad_fn().get());
}

}  // namespace
}  // namespace cohort::autograd

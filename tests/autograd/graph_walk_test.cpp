#include "cohort/autograd/graph_walk.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

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

TEST(GraphWalkTest, WhatIsBehindANodeComesOnlyIfItIsAskedFor) {
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

}  // namespace
}  // namespace cohort::autograd

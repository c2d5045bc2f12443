#include "cohort/autograd/anchor_node.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <thread>

#include "cohort/autograd/tensor_box.h"
#include "cohort/core/torch_compat.h"

namespace cohort::autograd {
namespace {

using Tensors = std::vector<at::Tensor>;

// Keeps what arrives, and hands on twice the sum of it.
struct Waiting : torch::autograd::Node {
  Tensors apply(Tensors&& gradients) override {
    last = take_gradients(gradients.front());
    ran_on = std::this_thread::get_id();
    at::Tensor sum = at::zeros({2});
    for (const at::Tensor& gradient : last) {
      if (gradient.defined()) sum += gradient;
    }
    return {sum * 2};
  }
  Tensors last;
  std::thread::id ran_on;
};

TEST(AnchorNodeTest, GetsTheGradientsOfAllResultsThroughTheAnchor) {
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  auto node = COHORT_MAKE_NODE(Waiting);
  node->set_next_edges({torch::autograd::impl::gradient_edge(leaf)});
  const at::Tensor anchor = make_anchor();
  torch::autograd::set_history(anchor, node);
  const Tensors results = {at::ones({2}), at::ones({2}), at::ones({2})};
  attach_to_anchor(anchor, results);
  torch::autograd::backward({results[0], results[2]}, {at::full({2}, 3.0), at::full({2}, 4.0)}, true);
  ASSERT_EQ(node->last.size(), 3U);
  EXPECT_TRUE(at::equal(node->last[0], at::full({2}, 3.0)));
  EXPECT_FALSE(node->last[1].defined());
  EXPECT_TRUE(at::equal(node->last[2], at::full({2}, 4.0)));
  EXPECT_TRUE(at::equal(leaf.grad(), at::full({2}, 14.0)));
  EXPECT_EQ(node->ran_on, std::this_thread::get_id());
  EXPECT_FALSE(is_device_autograd_thread());
  torch::autograd::backward({results[1]}, {at::ones({2})});  // the graph was kept
  EXPECT_TRUE(at::equal(leaf.grad(), at::full({2}, 16.0)));
}

TEST(TensorBoxTest, ATensorOwnsWhatItCarries) {
  auto value = std::make_shared<int>(7);
  at::Tensor tensor = box_in_tensor(std::make_unique<std::shared_ptr<int>>(value));
  EXPECT_EQ(tensor.numel(), 0);
  EXPECT_EQ(*unbox<std::shared_ptr<int>>(tensor), 7);
  EXPECT_EQ(value.use_count(), 2);
  tensor.reset();
  EXPECT_EQ(value.use_count(), 1);
}

}  // namespace
}  // namespace cohort::autograd

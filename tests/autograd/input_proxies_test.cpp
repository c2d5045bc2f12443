#include "cohort/autograd/input_proxies.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <functional>

#include "cohort/autograd/detached_graph.h"
#include "cohort/base/error.h"
#include "cohort/core/torch_compat.h"
#include "tests/support/throws.h"

namespace cohort::autograd {
namespace {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

// A node whose edges go to the inputs: it takes the results' gradients through the detached graph.
class PartNode : public torch::autograd::Node {
 public:
  explicit PartNode(std::shared_ptr<DetachedGraph> part) : part_(std::move(part)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    Tensors of_results;
    std::size_t next = 0;
    for (const bool needs : part_->needs_gradient()) {
      of_results.push_back(needs ? gradients[next++] : at::Tensor());
    }
    Tensors of_inputs = part_->backward(of_results, true);
    of_inputs.resize(num_outputs());  // without those of parameters
    return of_inputs;
  }

 private:
  std::shared_ptr<DetachedGraph> part_;
};

// Runs fn in a graph of its own, as script mode and parallel do.
Tensors run_in_detached_graph(const Function& fn, const Tensors& inputs) {
  const auto part = std::make_shared<DetachedGraph>(inputs);
  InputProxies proxies("test.run_detached", inputs, part->leaves());
  Tensors results = fn(proxies.tensors());
  proxies.observe(results);
  results = part->end(results);
  auto node = COHORT_MAKE_NODE(PartNode, part);
  node->set_next_edges(edges_of(inputs));
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (part->needs_gradient()[i]) torch::autograd::set_history(results[i], node);
  }
  proxies.write_back(results);
  return results;
}

// An input with a history, so that a function may write to it.
at::Tensor inner(const at::Tensor& leaf) {
  return leaf * 2;
}

TEST(InputProxiesTest, AnInputThatIsGivenTwiceIsHandedOverTwice) {
  const at::Tensor leaf = at::ones({2}).requires_grad_(), x = inner(leaf);
  run_in_detached_graph(
      [](const Tensors& in) {
        EXPECT_TRUE(in[0].is_same(in[1]));
        EXPECT_FALSE(in[0].is_same(in[2]));
        return Tensors{in[0] + in[2]};
      },
      {x, x, leaf});
}

TEST(InputProxiesTest, LeavesStayLeavesAndOtherInputsMayBeWritten) {
  const at::Tensor leaf = at::ones({2}).requires_grad_(), x = inner(leaf), constant = at::ones({2});
  run_in_detached_graph(
      [](const Tensors& in) {
        EXPECT_TRUE(in[0].is_leaf() && in[0].requires_grad());
        EXPECT_TRUE(in[1].requires_grad() && !in[1].is_leaf());
        EXPECT_FALSE(in[2].requires_grad());
        in[2].add_(1);
        return Tensors{in[0] * in[2]};
      },
      {leaf, x, constant});
  EXPECT_EQ(constant[0].item<float>(), 2) << "the caller's tensor itself was written to";
}

// The caller sees the new values, and its gradients go through what the function did.
TEST(InputProxiesTest, AnInputThatWasWrittenGetsTheHistoryOfItsResult) {
  const Function triple = [](const Tensors& in) {
    in[0].mul_(3);
    return Tensors{in[0].sum()};
  };
  for (const bool is_detached : {false, true}) {
    const at::Tensor leaf = at::ones({2}).requires_grad_();
    at::Tensor x = inner(leaf);
    const Tensors results = is_detached ? run_in_detached_graph(triple, {x}) : triple({x});
    EXPECT_EQ(x[0].item<float>(), 6) << is_detached;
    (x * 5).sum().backward();
    EXPECT_EQ(leaf.grad()[0].item<float>(), 2 * 3 * 5) << is_detached;
    EXPECT_EQ(results[0].item<float>(), 12) << is_detached;
  }
}

TEST(InputProxiesTest, AResultThatIsAnInputIsTheCallersTensor) {
  const at::Tensor leaf = at::ones({2, 2}).requires_grad_(), x = inner(leaf);
  const Tensors results =
      run_in_detached_graph([](const Tensors& in) { return Tensors{in[0], in[0].view({4})}; }, {x});
  EXPECT_TRUE(results[0].is_same(x));
  EXPECT_TRUE(results[1].is_alias_of(x));
  results[1].mul_(2);
  EXPECT_EQ(x[0][0].item<float>(), 4);
}

TEST(InputProxiesTest, AnInputThatSharesTheMemoryOfOneThatIsWrittenIsRejected) {
  const at::Tensor leaf = at::ones({4}).requires_grad_(), x = inner(leaf);
  COHORT_EXPECT_THROW_WITH(run_in_detached_graph(
                               [](const Tensors& in) {
                                 in[0].mul_(2);
                                 return Tensors{in[0] + 1};
                               },
                               {x.narrow(0, 0, 3), x.narrow(0, 1, 3)}),
                           UsageError, "input 0 is changed in place, and input 1 shares its memory");
}

}  // namespace
}  // namespace cohort::autograd

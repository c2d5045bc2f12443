// Which gradients a context gives out without a copy, by the addresses of their elements. The first tests are
// PyTorch's test_no_grad_copy, test_no_grad_copy_sparse and test_grad_copy_sparse_indices_extra_ref.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/dist_optimizer.h"
#include "cohort/rpc/internal/own_gradient.h"
#include "tests/rpc/job.h"

namespace cohort::rpc {
namespace {

using dist_autograd::Context;
using dist_autograd::ContextId;
using test::Job;
using torch::autograd::AutogradContext;
using Variables = torch::autograd::variable_list;

// What the node below got, or made, in its backward.
const void* address_in_backward = nullptr;
std::vector<at::Tensor> kept_in_backward;

// Its backward is the function that the test gives: from the gradient of the result to those of the
// arguments.
using BackwardFunction = std::function<Variables(const at::Tensor&)>;
BackwardFunction backward_of_node;
struct NodeOfTest : torch::autograd::Function<NodeOfTest> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& a) { return a.clone(); }
  static Variables backward(AutogradContext*, Variables gradients) {
    const at::Tensor gradient = std::move(gradients[0]);
    return backward_of_node(gradient);
  }
};
struct PairOfTest : torch::autograd::Function<PairOfTest> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& a, const at::Tensor& b) { return a + b; }
  static Variables backward(AutogradContext*, Variables gradients) {
    const at::Tensor gradient = std::move(gradients[0]);
    return backward_of_node(gradient);
  }
};

at::Tensor table_of_callee;  // a parameter
at::Tensor row_of_table(std::int64_t row) {
  return table_of_callee[row];
}
std::uintptr_t address_of_gradient(ContextId id) {
  return reinterpret_cast<std::uintptr_t>(dist_autograd::get_gradients(id).at(0).second.const_data_ptr());
}
at::Tensor negate_gradient(ContextId id) {
  return dist_autograd::get_gradients(id).at(0).second.neg_().clone();
}
RRef<at::Tensor> reference_of_table() {
  return make_rref(table_of_callee);
}
COHORT_REMOTE(row_of_table);
COHORT_REMOTE(address_of_gradient);
COHORT_REMOTE(negate_gradient);
COHORT_REMOTE(reference_of_table);

const void* address_of(const at::Tensor& tensor) {
  return tensor.is_sparse() ? tensor._values().const_data_ptr() : tensor.const_data_ptr();
}

class GradientCopiesTest : public testing::Test {
 protected:
  ~GradientCopiesTest() override {
    backward_of_node = nullptr;
    kept_in_backward.clear();
    table_of_callee.reset();
  }
  static at::Tensor gradient_of(const Context& context, const at::Tensor& leaf) {
    for (const auto& [known, gradient] : dist_autograd::get_gradients(context)) {
      if (known.is_same(leaf)) return gradient;
    }
    return {};
  }
  static at::Tensor leaf_of(at::IntArrayRef sizes) { return at::randn(sizes).requires_grad_(); }
  // Of an embedding with a sparse gradient.
  static at::Tensor loss_of_bags(const at::Tensor& rows) {
    const at::Tensor words = at::tensor({1, 2, 4, 5, 4, 3, 2, 9}, at::kLong);
    return std::get<0>(at::embedding_bag(rows, words, at::tensor({0, 4}, at::kLong), false, /*mode=*/1,
                                         /*sparse=*/true))
        .sum();
  }

  Job job{2};
};

TEST_F(GradientCopiesTest, AGradientThatNobodyElseHasIsTheNodesTensor) {
  const at::Tensor a = leaf_of({5, 6});
  backward_of_node = [](const at::Tensor& gradient) {
    address_in_backward = address_of(gradient);
    return Variables{gradient};
  };
  Context context(job[0]);
  dist_autograd::backward(context, {NodeOfTest::apply(a)[1][0]});
  const at::Tensor gradient = gradient_of(context, a);
  EXPECT_EQ(address_of(gradient), address_in_backward);
  EXPECT_TRUE(gradient_of(context, a).is_same(gradient)) << "each call gives the same tensor";
}

TEST_F(GradientCopiesTest, AnExpandedGradientAndOneOfTwoLeavesAreCopied) {
  const at::Tensor a = leaf_of({5, 6}), b = leaf_of({5, 6});
  const at::Tensor expanded = at::ones({1}).expand({5, 6});
  for (const bool is_expanded : {true, false}) {
    backward_of_node = [&](const at::Tensor& gradient) {
      const at::Tensor given = is_expanded ? expanded.detach() : gradient;
      address_in_backward = address_of(given);
      return Variables{given, given};
    };
    Context context(job[0]);
    dist_autograd::backward(context, {PairOfTest::apply(a, b)[1][0]});
    const at::Tensor of_a = gradient_of(context, a), of_b = gradient_of(context, b);
    EXPECT_NE(address_of(of_a), address_of(of_b)) << is_expanded;
    EXPECT_NE(address_of(of_a), address_in_backward) << is_expanded;
    EXPECT_NE(address_of(of_b), address_in_backward) << is_expanded;
    EXPECT_TRUE(of_a.is_contiguous()) << is_expanded;
  }
}

// Each leaf has a tensor of its own, so counts of references do not show that the memory is one.
TEST_F(GradientCopiesTest, ViewsOfOneTensorAreCopiedWhereTheyOverlap) {
  const at::Tensor a = leaf_of({5, 6}), b = leaf_of({5, 6}), halves = leaf_of({2, 3}),
                   quarter = leaf_of({2, 3});
  Context context(job[0]);
  backward_of_node = [](const at::Tensor& gradient) { return Variables{gradient, gradient.view({5, 6})}; };
  dist_autograd::backward(context, {PairOfTest::apply(a, b)[1][0]});
  gradient_of(context, a).fill_(7);
  EXPECT_EQ(gradient_of(context, b).max().item<float>(), 1);
  Context of_halves(job[0]);
  at::Tensor both;
  backward_of_node = [&](const at::Tensor&) {
    both = at::arange(12, at::kFloat).view({2, 2, 3});
    return Variables{both[0], both[1]};
  };
  dist_autograd::backward(of_halves, {PairOfTest::apply(halves, quarter).sum()});
  EXPECT_EQ(address_of(gradient_of(of_halves, halves)), address_of(both[0]));
  EXPECT_EQ(address_of(gradient_of(of_halves, quarter)), address_of(both[1]));
}

TEST_F(GradientCopiesTest, ASparseGradientIsTheNodesTensorAlsoWhereViewsOfItAreHeld) {
  const at::Tensor a = leaf_of({10, 3});
  backward_of_node = [](const at::Tensor& gradient) {
    address_in_backward = address_of(gradient);
    kept_in_backward = {gradient._indices(), gradient._values()};
    return Variables{gradient};
  };
  Context context(job[0]);
  const at::Tensor loss = loss_of_bags(NodeOfTest::apply(a));
  dist_autograd::backward(context, {loss}, {.keep_graph = true});
  const at::Tensor gradient = gradient_of(context, a);
  ASSERT_TRUE(gradient.is_sparse());
  EXPECT_EQ(address_of(gradient), address_in_backward);
  const at::Tensor once = gradient.to_dense();
  for (int i = 0; i < 10; ++i) dist_autograd::backward(context, {loss}, {.keep_graph = true});
  EXPECT_TRUE(at::allclose(gradient_of(context, a).to_dense(), 11 * once));
  EXPECT_TRUE(at::equal(gradient.to_dense(), once)) << "later backwards do not change what was given";
}

TEST_F(GradientCopiesTest, ASparseGradientWithGapsIsCopiedForEachLeaf) {
  const at::Tensor a = leaf_of({10, 3}), b = leaf_of({10, 3});
  backward_of_node = [](const at::Tensor&) {
    const at::Tensor values = at::rand({1, 3}).expand({8, 3}),
                     indices = at::ones({1, 1}, at::kLong).expand({1, 8});
    const at::Tensor gradient = at::_sparse_coo_tensor_unsafe(indices, values, {10, 3});
    address_in_backward = address_of(gradient);
    return Variables{gradient, gradient};
  };
  Context context(job[0]);
  const at::Tensor loss = loss_of_bags(PairOfTest::apply(a, b));
  dist_autograd::backward(context, {loss}, {.keep_graph = true});
  const at::Tensor of_a = gradient_of(context, a), of_b = gradient_of(context, b);
  EXPECT_NE(address_of(of_a), address_of(of_b));
  EXPECT_NE(address_of(of_a), address_in_backward);
  EXPECT_NE(address_of(of_b), address_in_backward);
  for (int i = 0; i < 10; ++i) dist_autograd::backward(context, {loss}, {.keep_graph = true});
}

TEST_F(GradientCopiesTest, ATransposedGradientTakesTheStridesOfItsLeaf) {
  const at::Tensor a = leaf_of({5, 6}), transposed = at::randn({6, 5}).t().requires_grad_();
  backward_of_node = [](const at::Tensor&) {
    at::Tensor gradient = at::ones({6, 5}).t();
    address_in_backward = address_of(gradient);
    return Variables{std::move(gradient)};
  };
  Context context(job[0]);
  dist_autograd::backward(context, {NodeOfTest::apply(a).sum()});
  EXPECT_TRUE(gradient_of(context, a).is_contiguous());
  EXPECT_NE(address_of(gradient_of(context, a)), address_in_backward);
  dist_autograd::backward(context, {NodeOfTest::apply(transposed).sum()});
  EXPECT_EQ(address_of(gradient_of(context, transposed)), address_in_backward);
}

// What a program writes to a gradient, such as a clipped one, is what an optimizer steps with.
TEST_F(GradientCopiesTest, AWriteToAGradientIsAWriteToThatOfTheContext) {
  const at::Tensor a = leaf_of({3});
  Context context(job[0]);
  const at::Tensor loss = (a * 2).sum();
  dist_autograd::backward(context, {loss}, {.keep_graph = true});
  dist_autograd::backward(context, {loss}, {.keep_graph = true});
  gradient_of(context, a).mul_(0.25);
  EXPECT_TRUE(at::equal(gradient_of(context, a), at::ones({3})));
  dist_autograd::backward(context, {loss});
  EXPECT_TRUE(at::equal(gradient_of(context, a), at::full({3}, 3.0))) << "later gradients are added to it";
  dist_autograd::accumulate_into_grad(context);
  dist_autograd::accumulate_into_grad(context);
  EXPECT_TRUE(at::equal(a.grad(), at::full({3}, 6.0))) << "grad() has memory of its own";
  EXPECT_TRUE(at::equal(gradient_of(context, a), at::full({3}, 3.0)));
}

TEST_F(GradientCopiesTest, OnAnotherWorkerToo) {
  table_of_callee = at::zeros({4, 3}).requires_grad_();
  const RRef<at::Tensor> table = job[0].rpc_sync<reference_of_table>("w1");
  const std::vector parameters = {table};
  DistributedOptimizer optimizer(parameters, {.name = "sgd", .lr = 1});
  Context context(job[0]);
  dist_autograd::backward(context, {job[0].rpc_sync<row_of_table>("w1", std::int64_t{2}).sum()});
  const std::uintptr_t address = job[0].rpc_sync<address_of_gradient>("w1", context.id());
  EXPECT_EQ(job[0].rpc_sync<address_of_gradient>("w1", context.id()), address);
  job[0].rpc_sync<negate_gradient>("w1", context.id());
  optimizer.step(context);
  EXPECT_TRUE(at::equal(table_of_callee.sum(1), at::tensor({0.F, 0.F, 3.F, 0.F})));
}

// A call to the own worker uses the leaf too. Its hooks are others', so the sums stay apart.
TEST_F(GradientCopiesTest, ALeafOfTheProgramAndOfCallsHasANewSumEachTime) {
  table_of_callee = at::zeros({2, 3}).requires_grad_();
  Context context(job[0]);
  const at::Tensor row = job[0].rpc_sync<row_of_table>("w0", std::int64_t{1});
  dist_autograd::backward(context, {row.sum() + table_of_callee.sum()});
  const at::Tensor expected = at::tensor({3.F, 6.F});
  gradient_of(context, table_of_callee).zero_();
  EXPECT_TRUE(at::equal(gradient_of(context, table_of_callee).sum(1), expected));
  dist_autograd::accumulate_into_grad(context);
  EXPECT_TRUE(at::equal(table_of_callee.grad().sum(1), expected));
}

TEST(OverlappingTensorsTest, TensorsOverlapWhereOneBeginsBeforeAnotherEnds) {
  const at::Tensor base = at::zeros({4, 4}), apart = at::zeros({4, 4});
  const std::vector<at::Tensor> tensors = {base.narrow(0, 0, 3), base[1], base[2], base[3], apart, apart,
                                           at::empty({0})};
  const OverlappingTensors overlapping(tensors);
  const std::vector<bool> expected = {true, true, true, false, false, false, false};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(overlapping.has(tensors[i]), expected[i]) << i;
  }
}

}  // namespace
}  // namespace cohort::rpc

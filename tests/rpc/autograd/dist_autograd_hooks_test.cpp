// Hooks of leaves, and of their gradient accumulators.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/dist_autograd.h"
#include "tests/rpc/job.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using dist_autograd::Context;
using dist_autograd::ContextId;
using test::Job;

at::Tensor hooked_weight;  // a parameter of whoever multiplies by it
at::Tensor times_hooked(const at::Tensor& x) {
  return x * hooked_weight;
}
void add_to_grad(ContextId id) {
  dist_autograd::accumulate_into_grad(id);
}
COHORT_REMOTE(times_hooked);
COHORT_REMOTE(add_to_grad);

// A leaf whose gradient is multiplied by 10, and which counts how often that is done, and how often its
// gradient has been added.
struct Hooked {
  explicit Hooked(const at::Tensor& values) : leaf(values.clone().requires_grad_()) {
    leaf.register_hook([this](const at::Tensor& gradient) {
      ++num_hooks;
      return gradient * 10;
    });
    accumulator = torch::autograd::impl::grad_accumulator(leaf);
    using torch::autograd::variable_list;
    accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [this](const variable_list& outputs, const variable_list& /*inputs*/) {
          ++num_added;
          return outputs;
        }));
  }
  Hooked(const Hooked&) = delete;
  Hooked& operator=(const Hooked&) = delete;
  at::Tensor leaf;
  decltype(torch::autograd::impl::grad_accumulator(leaf)) accumulator;  // has the hook while it lives
  std::atomic<int> num_hooks{0}, num_added{0};
};

class DistAutogradHooksTest : public testing::Test {
 protected:
  DistAutogradHooksTest() { hooked_weight = weight.leaf; }
  ~DistAutogradHooksTest() override { hooked_weight.reset(); }
  Hooked weight{at::tensor({2.0, 3.0})}, x{at::tensor({5.0, 7.0})};
  Job job{2};
};

TEST_F(DistAutogradHooksTest, HooksOfAnOwnersLeafRunOnceWithTheSumOfAllCalls) {
  Context context(job[0]);
  const at::Tensor first = job[0].rpc_sync<times_hooked>("w1", x.leaf),
                   second = job[0].rpc_sync<times_hooked>("w1", x.leaf * 2);
  dist_autograd::backward(context, {(first + second).sum()});
  EXPECT_EQ(weight.num_hooks.load(), 0) << "no gradient has gone to grad()";
  EXPECT_FALSE(weight.leaf.grad().defined());
  for (int i = 1; i <= 2; ++i) {
    job[0].rpc_sync<add_to_grad>("w1", context.id());
    EXPECT_EQ(weight.num_hooks.load(), i);
    EXPECT_EQ(weight.num_added.load(), i);
    EXPECT_TRUE(at::equal(weight.leaf.grad(), i * 30 * x.leaf.detach()));
  }
  COHORT_EXPECT_THROW_WITH(dist_autograd::accumulate_into_grad(context.id()), UsageError,
                           "outside of a handler");
}

// Those of the program's own leaves run in the backward, as LibTorch runs them.
TEST_F(DistAutogradHooksTest, HooksOfTheProgramsLeavesRunInItsBackward) {
  Context context(job[0]);
  const at::Tensor y = job[0].rpc_sync<times_hooked>("w0", x.leaf);
  dist_autograd::backward(context, {(y + x.leaf).sum()});
  EXPECT_EQ(x.num_hooks.load(), 1);
  EXPECT_EQ(x.num_added.load(), 0);
  const at::Tensor of_x = 10 * (weight.leaf.detach() + 1);
  for (const auto& [leaf, gradient] : dist_autograd::get_gradients(context)) {
    if (leaf.is_same(x.leaf)) {
      EXPECT_TRUE(at::equal(gradient, of_x));
    }
  }
  dist_autograd::accumulate_into_grad(context);
  EXPECT_EQ(x.num_hooks.load(), 1) << "not a second time";
  EXPECT_TRUE(at::equal(x.leaf.grad(), of_x));
  EXPECT_EQ(weight.num_hooks.load(), 1);
  EXPECT_TRUE(at::equal(weight.leaf.grad(), 10 * x.leaf.detach()));
}

TEST_F(DistAutogradHooksTest, HooksOfAccumulatorsRunWhereGradientsGoIntoGrad) {
  Context context(job[0]);
  const at::Tensor y = job[0].rpc_sync<times_hooked>("w1", x.leaf);
  dist_autograd::backward(context, {y.sum()}, {.into_grad = true});
  EXPECT_EQ(x.num_hooks.load(), 1);
  EXPECT_EQ(x.num_added.load(), 1);
  EXPECT_TRUE(at::equal(x.leaf.grad(), 10 * weight.leaf.detach()));
}

}  // namespace
}  // namespace cohort::rpc

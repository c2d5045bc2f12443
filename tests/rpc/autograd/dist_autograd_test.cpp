#include "cohort/rpc/dist_autograd.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <random>
#include <thread>

#include "cohort/base/error.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using dist_autograd::Context;
using dist_autograd::ContextId;
using dist_autograd::Gradients;
using test::agent_of;
using test::comes_true;
using test::Job;
using test::patience;

at::Tensor weight;  // of whoever multiplies by it
at::Tensor times_weight(const at::Tensor& x) {
  return x * weight;
}
at::Tensor plus_weight(const at::Tensor& x) {
  return x + weight;
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> three(const at::Tensor& x) {
  return {x * weight, x.detach() + 1, x.sin()};
}
at::Tensor exponential(const at::Tensor& x) {
  return x.exp();
}
Future<at::Tensor> multiplies_later(const at::Tensor& x) {
  Promise<at::Tensor> ready;
  ready.set_value(x * weight);
  return ready.future();
}
at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return a * b;
}
// w1 calls w2, which calls back to w0.
at::Tensor through(const std::string& here, const at::Tensor& x) {
  if (here == "w0") return x.exp();
  const std::string next = here == "w1" ? "w2" : "w0";
  return agent_of(here).rpc_sync<through>(next, next, x * weight) + x;
}
std::optional<at::Tensor> gradient_here(ContextId id) {
  for (const auto& [leaf, gradient] : dist_autograd::get_gradients(id)) {
    if (leaf.is_same(weight)) return gradient;
  }
  return std::nullopt;
}
struct Fails : torch::autograd::Function<Fails> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*, std::vector<at::Tensor>) {
    throw NumericError("test.backward", "it fails in its backward");
  }
};
at::Tensor fails_in_backward(const at::Tensor& x) {
  return Fails::apply(x);
}
struct SleepsInBackward : torch::autograd::Function<SleepsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          std::vector<at::Tensor> gradients) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return gradients;
  }
};
at::Tensor sleeps_in_backward(const at::Tensor& x) {
  return SleepsInBackward::apply(x);
}
at::Tensor graph_of_its_own;
at::Tensor uses_another_graph(const at::Tensor& x) {
  return x + graph_of_its_own;
}

COHORT_REMOTE(times_weight);
COHORT_REMOTE(plus_weight);
COHORT_REMOTE(three);
COHORT_REMOTE(exponential);
COHORT_REMOTE(multiplies_later);
COHORT_REMOTE(product);
COHORT_REMOTE(through);
COHORT_REMOTE(gradient_here);
COHORT_REMOTE(fails_in_backward);
COHORT_REMOTE(sleeps_in_backward);
COHORT_REMOTE(uses_another_graph);

at::Tensor gradient_of(const Gradients& gradients, const at::Tensor& leaf) {
  for (const auto& [known, gradient] : gradients) {
    if (known.is_same(leaf)) return gradient;
  }
  return {};
}
at::Tensor leaf_of(std::initializer_list<double> values) {
  return at::tensor(values).requires_grad_();
}

TEST(DistAutogradTest, GradientsGoThroughACall) {
  Job job(2);
  weight = leaf_of({2, 3});
  const at::Tensor x = leaf_of({5, 7});
  {
    Context context(job[0]);
    const at::Tensor y = job[0].rpc_sync<times_weight>("w1", x.exp());
    EXPECT_TRUE(y.requires_grad());
    dist_autograd::backward(context, {(y * y).sum()});
    const at::Tensor expected = 2 * x.detach().exp() * weight.detach() * weight.detach() * x.detach().exp();
    const Gradients gradients = dist_autograd::get_gradients(context);
    ASSERT_EQ(gradients.size(), 1U);
    EXPECT_TRUE(at::allclose(gradient_of(gradients, x), expected));
    EXPECT_FALSE(x.grad().defined()) << "it stays in the context";
    const auto there = job[0].rpc_sync<gradient_here>("w1", context.id());
    ASSERT_TRUE(there.has_value());
    EXPECT_TRUE(at::allclose(*there, 2 * x.detach().exp().pow(2) * weight.detach()));
    dist_autograd::accumulate_into_grad(gradients);
    dist_autograd::accumulate_into_grad(gradients);
    EXPECT_TRUE(at::allclose(x.grad(), 2 * expected));
    EXPECT_EQ(job[1].metrics().contexts, 1U);
  }
  EXPECT_TRUE(comes_true([&] { return job[0].metrics().contexts + job[1].metrics().contexts == 0; }));
  EXPECT_FALSE(job[0].rpc_sync<times_weight>("w1", x).requires_grad()) << "no context";
  job.shutdown();
}

TEST(DistAutogradTest, GradientsOfTheProgramMayGoIntoGrad) {
  Job job(2);
  weight = leaf_of({2, 3});
  const at::Tensor x = leaf_of({5, 7});
  x.mutable_grad() = at::ones({2}, at::kDouble);
  int num_hooks = 0;
  x.register_hook([&](const at::Tensor& gradient) {
    ++num_hooks;
    return gradient * 10;
  });
  Context context(job[0]);
  const at::Tensor y = job[0].rpc_sync<times_weight>("w1", x);
  dist_autograd::backward(context, {(y + x).sum()}, {.into_grad = true});
  EXPECT_EQ(num_hooks, 1);
  EXPECT_TRUE(at::equal(x.grad(), 1 + 10 * (weight.detach() + 1)));
  EXPECT_TRUE(dist_autograd::get_gradients(context).empty());
  EXPECT_TRUE(at::equal(*job[0].rpc_sync<gradient_here>("w1", context.id()), x.detach()));
  job.shutdown();
}

// Another trainer may step a parameter meanwhile, as long as its value was not saved.
TEST(DistAutogradTest, AParameterMayChangeAfterACallThatDidNotSaveIt) {
  Job job(2);
  weight = leaf_of({2, 3});
  const at::Tensor x = leaf_of({5, 7});
  Context context(job[0]);
  const at::Tensor sum = job[0].rpc_sync<plus_weight>("w1", x),
                   product = job[0].rpc_sync<times_weight>("w1", x);
  weight.detach().add_(1);
  dist_autograd::backward(context, {sum.sum()});
  EXPECT_TRUE(at::equal(*job[0].rpc_sync<gradient_here>("w1", context.id()), at::ones({2}, at::kDouble)));
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {product.sum()}), c10::Error,
                           "modified by an inplace operation");
}

TEST(DistAutogradTest, NestedCallsAndCallsBack) {
  Job job(3);
  weight = leaf_of({0.5, 0.25});
  const at::Tensor x = leaf_of({0.1, 0.2});
  const at::Tensor reference_x = x.detach().clone().requires_grad_(),
                   reference_weight = weight.detach().clone().requires_grad_();
  const at::Tensor at_2 =
      (reference_x * reference_weight * reference_weight).exp() + reference_x * reference_weight;
  (at_2 + reference_x).sum().backward();
  Context context(job[0]);
  const at::Tensor y = job[0].rpc_sync<through>("w1", "w1", x);
  dist_autograd::backward(context, {y.sum()});
  EXPECT_TRUE(at::allclose(gradient_of(dist_autograd::get_gradients(context), x), reference_x.grad()));
  at::Tensor sum = at::zeros({2}, at::kDouble);
  for (const char* worker : {"w1", "w2"}) sum += *job[0].rpc_sync<gradient_here>(worker, context.id());
  EXPECT_TRUE(at::allclose(sum, reference_weight.grad()));
  job.shutdown();
}

TEST(DistAutogradTest, WhatTheLossDoesNotUseCostsNothing) {
  Job job(2);
  weight = leaf_of({2, 3});
  const at::Tensor x = leaf_of({5, 7});
  Context context(job[0]);
  const at::Tensor unused = job[0].rpc_sync<times_weight>("w1", x);
  const auto [a, b, c] = job[0].rpc_sync<three>("w1", x);
  EXPECT_TRUE(a.requires_grad());
  EXPECT_FALSE(b.requires_grad());
  at::Tensor no_gradient;
  {
    const at::NoGradGuard no_grad;
    no_gradient = job[0].rpc_sync<times_weight>("w1", x);
  }
  EXPECT_FALSE(no_gradient.requires_grad());
  const std::uint64_t before = job[0].metrics().calls_made;
  dist_autograd::backward(context, {(a + b + no_gradient).sum()});
  EXPECT_EQ(job[0].metrics().calls_made, before + 1) << "one part goes backward";
  EXPECT_TRUE(at::equal(gradient_of(dist_autograd::get_gradients(context), x), weight.detach()));
  job.shutdown();
}

// The callee's parameters get a gradient though no argument needs one.
TEST(DistAutogradTest, ACallWhoseArgumentsNeedNone) {
  Job job(2);
  weight = leaf_of({2, 3});
  Context context(job[0]);
  const at::Tensor y = job[0].rpc_sync<times_weight>("w1", at::tensor({4.0, 5.0}));
  dist_autograd::backward(context, {y.sum()});
  EXPECT_TRUE(dist_autograd::get_gradients(context).empty());
  EXPECT_TRUE(at::equal(*job[0].rpc_sync<gradient_here>("w1", context.id()), at::tensor({4.0, 5.0})));
  job.shutdown();
}

TEST(DistAutogradTest, SeveralBackwards) {
  Job job(2);
  weight = leaf_of({2, 3});
  const at::Tensor x = leaf_of({5, 7});
  Context context(job[0]);
  const at::Tensor y = job[0].rpc_sync<times_weight>("w1", x).sum();
  dist_autograd::backward(context, {y}, {.keep_graph = true});
  dist_autograd::backward(context, {y});
  EXPECT_TRUE(at::equal(gradient_of(dist_autograd::get_gradients(context), x), 2 * weight.detach()));
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {y}), UsageError, "the graph of a call is gone");
  const at::Tensor twice = job[0].rpc_sync<product>("w1", x, x);  // one leaf, two arguments
  dist_autograd::backward(context, {twice.sum()});
  EXPECT_TRUE(
      at::equal(gradient_of(dist_autograd::get_gradients(context), x), 2 * weight.detach() + 2 * x.detach()));
  job.shutdown();
}

TEST(DistAutogradTest, CallsGoBackwardAtTheSameTime) {
  Job job(3);
  const at::Tensor x = leaf_of({5, 7});
  Context context(job[0]);
  at::Tensor sum = at::zeros({2}, at::kDouble);
  for (const char* worker : {"w1", "w2", "w1", "w2"}) {
    sum = sum + job[0].rpc_sync<sleeps_in_backward>(worker, x * 2).exp();
  }
  const auto begin = std::chrono::steady_clock::now();
  dist_autograd::backward(context, {sum.sum()});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(900))
      << "one after the other: 1200";
  EXPECT_TRUE(
      at::allclose(gradient_of(dist_autograd::get_gradients(context), x), 8 * (2 * x.detach()).exp()));
  job.shutdown();
}

TEST(DistAutogradTest, AWorkerThatGoesEndsTheBackward) {
  Job job(2);
  weight = leaf_of({2, 3});
  const at::Tensor x = leaf_of({5, 7});
  Context context(job[0]);
  const at::Tensor y = job[0].rpc_sync<times_weight>("w1", x);
  job.drop(1);
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {y.sum()}), PeerError,
                           "rpc::backward_part on w1");
}

// One that is replaced by the next, as in a loop.
TEST(DistAutogradTest, ContextsMayEndInAnyOrder) {
  Job job(2);
  weight = leaf_of({2, 3});
  auto context = std::make_unique<Context>(job[0]);
  for (int i = 0; i < 3; ++i) {
    context = std::make_unique<Context>(job[0]);
    EXPECT_TRUE(job[0].rpc_sync<times_weight>("w1", leaf_of({5, 7})).requires_grad()) << i;
  }
  context.reset();
  EXPECT_FALSE(job[0].rpc_sync<times_weight>("w1", at::ones({2})).requires_grad());
  EXPECT_TRUE(comes_true([&] { return job[0].metrics().contexts + job[1].metrics().contexts == 0; }));
  job.shutdown();
}

// Values are a worker's own, also where it calls itself: what is written to them later changes no gradient.
TEST(DistAutogradTest, ABackwardThroughACallOfAnotherContextIsAnError) {
  weight = at::full({3}, 2.0).requires_grad_();
  Job job(2);
  Context first(job[0]);
  const at::Tensor x = at::ones({3}).requires_grad_();
  const at::Tensor loss = job[0].rpc_sync<times_weight>("w1", x).sum();
  Context second(job[0]);
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(second, {loss}), UsageError,
                           "the backward of another context leads through a call of context 1 of worker 0");
  dist_autograd::backward(first, {loss});
  const Gradients gradients = dist_autograd::get_gradients(first);
  ASSERT_EQ(gradients.size(), 1U);
  EXPECT_TRUE(at::equal(gradients[0].second, at::full({3}, 2.0)));
}

TEST(DistAutogradTest, WritesAfterACallChangeNoGradient) {
  Job job(2);
  for (const char* worker : {"w0", "w1"}) {
    const at::Tensor x = leaf_of({0.5, 0.25});
    Context context(job[0]);
    const at::Tensor given = x * 1;
    at::Tensor y = job[0].rpc_sync<exponential>(worker, given);
    y.add_(1);
    given.detach().zero_();
    dist_autograd::backward(context, {y.sum()});
    EXPECT_TRUE(at::allclose(gradient_of(dist_autograd::get_gradients(context), x), x.detach().exp()))
        << worker;
  }
  job.shutdown();
}

TEST(DistAutogradTest, AHandlerThatAnswersLaterGivesNoGradient) {
  Job job(2);
  weight = leaf_of({2, 3});
  Context context(job[0]);
  EXPECT_FALSE(job[0].rpc_sync<multiplies_later>("w1", leaf_of({5, 7})).requires_grad());
  job.shutdown();
}

TEST(DistAutogradTest, FailuresNameTheWorker) {
  Job job(2);
  weight = leaf_of({2, 3});
  const at::Tensor x = leaf_of({5, 7});
  Context context(job[0]);
  const at::Tensor y = job[0].rpc_sync<fails_in_backward>("w1", x);
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {y.sum()}), NumericError,
                           "rpc::backward_part on w1, call 2: [test.backward] it fails in its backward");
  graph_of_its_own = weight * 2;
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<uses_another_graph>("w1", x), UsageError, "a graph of its own");
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {at::ones({})}), UsageError, "needs no gradient");
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {x * 2}), UsageError, "2 elements");
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {}), UsageError, "no roots");
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<gradient_here>("w1", ContextId{0, 99}), UsageError, "context 99");
  COHORT_EXPECT_THROW_WITH(dist_autograd::get_gradients(context.id()), UsageError, "outside of a handler");
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc

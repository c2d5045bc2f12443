#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <chrono>
#include <optional>
#include <thread>
#include <tuple>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/dist_autograd.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using dist_autograd::Context;
using dist_autograd::ContextId;
using test::agent_of;
using test::comes_true;
using test::Job;
using TensorRRef = RRef<at::Tensor>;

at::Tensor factor;  // a parameter of whoever multiplies by it
at::Tensor times_factor(const at::Tensor& x) {
  return x * factor;
}
at::Tensor get_factor() {
  return factor;
}
at::Tensor sine_of(const TensorRRef& x) {
  return x.to_here().sin();
}
at::Tensor sine_where_it_lies(const TensorRRef& x) {
  return x.local_value()->sin();
}
at::Tensor kept_argument;
void keep_argument(const at::Tensor& x) {
  kept_argument = x;
}
at::Tensor use_kept_argument() {
  return kept_argument * 2;
}
at::Tensor returns_its_argument(const at::Tensor& x) {
  return x;
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> sine_product_and_index(const at::Tensor& x) {
  return {x.sin(), x * factor, at::arange(2)};
}
at::Tensor fails_to_make_object(const at::Tensor&) {
  throw DataError("test.object", "there is no object");
}
// A reference to the result of times_factor() on another worker.
TensorRRef make_at(const std::string& here, const std::string& there, const at::Tensor& x) {
  return agent_of(here).remote<times_factor>(there, x * 2);
}
TensorRRef make_by_another(const std::string& here, const std::string& there, const at::Tensor& x) {
  return agent_of(here).rpc_sync<make_at>(there, there, here, x * 3);
}
TensorRRef computed_before(const std::string& here) {
  const at::AutoGradMode with_gradients(true);  // the caller is in a NoGradGuard
  return agent_of(here).make_rref(factor * 2);
}
at::Tensor uses_its_own_object(const std::string& here, const at::Tensor& x) {
  const TensorRRef object = agent_of(here).remote<times_factor>(here, x);
  return object.local_value()->sin();
}
std::optional<at::Tensor> factor_gradient(ContextId id) {
  for (const auto& [leaf, gradient] : dist_autograd::get_gradients(id)) {
    if (leaf.is_same(factor)) return gradient;
  }
  return std::nullopt;
}
struct SlowBackward : torch::autograd::Function<SlowBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          std::vector<at::Tensor> gradients) {
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    return gradients;
  }
};
at::Tensor slow_shard(const TensorRRef& x) {
  return SlowBackward::apply(x.to_here()) * factor;
}

// The order in which calls are to do something.
struct Posting {
  TensorRRef object;
  test::Gate is_posted, may_answer;
};
Posting* posting = nullptr;
void posts_object(const std::string& here, const at::Tensor& x) {
  posting->object = agent_of(here).make_rref(x * factor);
  posting->is_posted.open();
  posting->may_answer.wait();
}
void posts_by_another(const std::string& here, const std::string& there, const at::Tensor& x) {
  agent_of(here).rpc_async<posts_object>(there, there, x);  // not waited for
}
at::Tensor sine_of_posted() {
  posting->is_posted.wait();
  return posting->object.to_here().sin();
}
at::Tensor times_factor_when_allowed(const at::Tensor& x) {
  posting->may_answer.wait();
  return x * factor;
}
at::Tensor fails_when_allowed(const at::Tensor&) {
  posting->may_answer.wait();
  throw DataError("test.object", "it fails late");
}
struct AllowsInBackward : torch::autograd::Function<AllowsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          std::vector<at::Tensor> gradients) {
    posting->may_answer.open();
    return gradients;
  }
};
Future<std::tuple<at::Tensor, at::Tensor, at::Tensor>> tuple_later(const at::Tensor& x) {
  Promise<std::tuple<at::Tensor, at::Tensor, at::Tensor>> promise;
  promise.set_value({x, x * factor, factor});
  return promise.future();
}

COHORT_REMOTE(posts_object);
COHORT_REMOTE(posts_by_another);
COHORT_REMOTE(sine_of_posted);
COHORT_REMOTE(times_factor_when_allowed);
COHORT_REMOTE(fails_when_allowed);
COHORT_REMOTE(tuple_later);
COHORT_REMOTE(times_factor);
COHORT_REMOTE(get_factor);
COHORT_REMOTE(sine_of);
COHORT_REMOTE(sine_where_it_lies);
COHORT_REMOTE(keep_argument);
COHORT_REMOTE(use_kept_argument);
COHORT_REMOTE(returns_its_argument);
COHORT_REMOTE(sine_product_and_index);
COHORT_REMOTE(fails_to_make_object);
COHORT_REMOTE(make_at);
COHORT_REMOTE(make_by_another);
COHORT_REMOTE(computed_before);
COHORT_REMOTE(uses_its_own_object);
COHORT_REMOTE(factor_gradient);
COHORT_REMOTE(slow_shard);

at::Tensor new_leaf(std::initializer_list<double> values) {
  return at::tensor(values).requires_grad_();
}

class DistAutogradObjectsTest : public testing::Test {
 protected:
  DistAutogradObjectsTest() { factor = new_leaf({2, 3}); }
  ~DistAutogradObjectsTest() override { factor.reset(); }

  // Of x at the root.
  at::Tensor gradient_of_x(const Context& context) const {
    for (const auto& [leaf, gradient] : dist_autograd::get_gradients(context)) {
      if (leaf.is_same(x)) return gradient;
    }
    return {};
  }
  at::Tensor gradient_of_factor(const std::string& worker, const Context& context) {
    const at::NoGradGuard no_grad;
    return job[0].rpc_sync<factor_gradient>(worker, context.id()).value_or(at::Tensor());
  }
  // w1 dies, and w0 knows of it.
  void drop_and_see() {
    job.drop(1);
    const at::NoGradGuard not_recorded;
    EXPECT_TRUE(comes_true([&] {
      try {
        job[0].rpc_sync<returns_its_argument>("w1", x);
        return false;
      } catch (const PeerError&) {
        return true;
      }
    }));
  }
  // What one process computes: of x, and of the factor.
  template <typename Fn>
  std::pair<at::Tensor, at::Tensor> locally(const Fn& loss) {
    const at::Tensor local_x = x.detach().clone().requires_grad_(),
                     local_factor = factor.detach().clone().requires_grad_();
    loss(local_x, local_factor).backward();
    return {local_x.grad(), local_factor.grad()};
  }

  Job job{3};
  const at::Tensor x = new_leaf({0.5, 0.7});
};

TEST_F(DistAutogradObjectsTest, GradientsOfAllUsersAddUpAndReachTheArguments) {
  Context context(job[0]);
  const TensorRRef object = job[0].remote<times_factor>("w1", x.exp());
  const at::Tensor here = object.to_here(), again = object.to_here();
  EXPECT_TRUE(here.requires_grad());
  const at::Tensor there = job[0].rpc_sync<sine_of>("w2", object),
                   in_place = job[0].rpc_sync<sine_where_it_lies>("w1", object);
  job[0].rpc_sync<sine_of>("w2", object);  // nobody uses the result
  dist_autograd::backward(context, {(here * here + again.exp() + there * in_place).sum()});
  const auto [of_x, of_factor] = locally([](const at::Tensor& a, const at::Tensor& b) {
    const at::Tensor y = a.exp() * b;
    return (y * y + y.exp() + y.sin() * y.sin()).sum();
  });
  EXPECT_TRUE(at::allclose(gradient_of_x(context), of_x));
  EXPECT_TRUE(at::allclose(gradient_of_factor("w1", context), of_factor));
  EXPECT_FALSE(gradient_of_factor("w2", context).defined());
}

TEST_F(DistAutogradObjectsTest, AParameterStaysItself) {
  Context context(job[0]);
  const TensorRRef made = job[0].remote<get_factor>("w1");
  const at::Tensor copy = made.to_here();
  EXPECT_TRUE(copy.requires_grad());
  const at::Tensor y = job[0].rpc_sync<sine_where_it_lies>("w1", made);
  dist_autograd::backward(context, {(copy * x).sum() + y.sum()});
  EXPECT_TRUE(at::allclose(gradient_of_factor("w1", context), x.detach() + factor.detach().cos()));
  EXPECT_TRUE(at::allclose(gradient_of_x(context), factor.detach()));
}

// Also where its owner fetches it: first the program's own uses, then its calls from the last to the first.
TEST_F(DistAutogradObjectsTest, FetchesOfAParameterHaveTheirPlaceInTheSum) {
  const at::Tensor parameter = at::ones({1}).requires_grad_();
  const TensorRRef object = job[0].make_rref(parameter);
  EXPECT_TRUE(object.to_here().is_same(parameter)) << "no context";
  Context context(job[0]);
  const at::Tensor first = object.to_here(), second = object.to_here();
  EXPECT_FALSE(first.is_same(parameter));
  dist_autograd::backward(context, {(parameter * 1e8 + first - second * 1e8).sum()});
  const dist_autograd::Gradients gradients = dist_autograd::get_gradients(context);
  ASSERT_EQ(gradients.size(), 1U);
  EXPECT_TRUE(gradients[0].first.is_same(parameter));
  EXPECT_EQ(gradients[0].second.item<float>(), 1) << "(1e8 - 1e8) + 1";
}

// PyTorch's example of a model in shards hands its input on as a reference.
TEST_F(DistAutogradObjectsTest, AReferenceToATensorOfTheCaller) {
  Context context(job[0]);
  const TensorRRef input = job[0].make_rref(x * 2), leaf = job[0].make_rref(x);
  EXPECT_TRUE(input.to_here().requires_grad()) << "on the owner too";
  const at::Tensor y = job[0].rpc_sync<sine_of>("w1", input), z = job[0].rpc_sync<sine_of>("w2", leaf);
  dist_autograd::backward(context, {(y * z * input.to_here()).sum()});
  const auto of_x = locally([](const at::Tensor& a, const at::Tensor&) {
                      return ((a * 2).sin() * a.sin() * (a * 2)).sum();
                    }).first;
  EXPECT_TRUE(at::allclose(gradient_of_x(context), of_x));
}

TEST_F(DistAutogradObjectsTest, ObjectsThatHandlersMake) {
  Context context(job[0]);
  const TensorRRef object = job[0].rpc_sync<make_by_another>("w1", "w1", "w2", x);
  EXPECT_EQ(object.owner().name, "w1");
  const at::Tensor y = job[0].rpc_sync<sine_of>("w2", object);
  dist_autograd::backward(context, {(y * object.to_here()).sum()});
  const auto [of_x, of_factor] = locally([](const at::Tensor& a, const at::Tensor& b) {
    const at::Tensor z = a * 6 * b;
    return (z.sin() * z).sum();
  });
  EXPECT_TRUE(at::allclose(gradient_of_x(context), of_x));
  EXPECT_TRUE(at::allclose(gradient_of_factor("w1", context), of_factor));
}

TEST_F(DistAutogradObjectsTest, AnArgumentThatIsTheObject) {
  Context context(job[0]);
  const TensorRRef object = job[0].remote<returns_its_argument>("w1", x * 2);
  const at::Tensor y = job[0].rpc_sync<sine_where_it_lies>("w1", object);
  dist_autograd::backward(context, {(y + object.to_here()).sum()});
  EXPECT_TRUE(at::allclose(gradient_of_x(context), 2 * (2 * x.detach()).cos() + 2));
}

TEST_F(DistAutogradObjectsTest, TensorsWithinAnObject) {
  Context context(job[0]);
  const auto object = job[0].remote<sine_product_and_index>("w1", x);
  const auto [sine, product, index] = object.to_here();
  EXPECT_FALSE(index.requires_grad());
  dist_autograd::backward(context, {product.sum()});
  EXPECT_TRUE(at::equal(gradient_of_x(context), factor.detach()));
}

TEST_F(DistAutogradObjectsTest, WhatTheLossDoesNotUseHasNoGradient) {
  Context context(job[0]);
  const TensorRRef unused = job[0].remote<times_factor>("w1", x),
                   unread = job[0].remote<times_factor>("w2", x);
  unused.to_here();
  dist_autograd::backward(context, {(x * 2).sum()});
  EXPECT_TRUE(at::equal(gradient_of_x(context), at::full({2}, 2.0, at::kDouble)));
  EXPECT_FALSE(gradient_of_factor("w1", context).defined());
}

TEST_F(DistAutogradObjectsTest, SeveralBackwards) {
  Context context(job[0]);
  const TensorRRef a = job[0].remote<times_factor>("w1", x.exp()),
                   b = job[0].remote<times_factor>("w2", x.sin());
  const at::Tensor of_a = a.to_here().sum(), of_b = b.to_here().sum();
  dist_autograd::backward(context, {of_a});
  const at::Tensor gradient_of_a = x.detach().exp() * factor.detach();
  EXPECT_TRUE(at::allclose(gradient_of_x(context), gradient_of_a));
  dist_autograd::backward(context, {of_b}, {.keep_graph = true});
  dist_autograd::backward(context, {of_b}, {.keep_graph = true});
  EXPECT_TRUE(at::allclose(gradient_of_x(context), gradient_of_a + 2 * x.detach().cos() * factor.detach()));
  const at::Tensor more = a.to_here().sum();
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {more}), UsageError,
                           "the graph of an object is gone");
}

// Whether a call has made an object is known only from its answer.
TEST_F(DistAutogradObjectsTest, ACallWithoutAnAnswerMayHaveMadeAnObject) {
  for (const bool is_below : {false, true}) {
    Posting order;
    posting = &order;
    Context context(job[0]);
    if (is_below) {
      job[0].rpc_sync<posts_by_another>("w2", "w2", "w1", x);
    } else {
      job[0].rpc_async<posts_object>("w1", "w1", x);
    }
    const at::Tensor y = job[0].rpc_sync<sine_of_posted>("w1");
    dist_autograd::backward(context, {AllowsInBackward::apply(y).sum()});
    const auto [of_x, of_factor] =
        locally([](const at::Tensor& a, const at::Tensor& b) { return (a * b).sin().sum(); });
    EXPECT_TRUE(at::allclose(gradient_of_x(context), of_x)) << is_below;
    EXPECT_TRUE(at::allclose(gradient_of_factor("w1", context), of_factor)) << is_below;
  }
}

TEST_F(DistAutogradObjectsTest, AResultThatComesDuringABackwardIsForTheNext) {
  Posting order;
  posting = &order;
  Context context(job[0]);
  Future<at::Tensor> result = job[0].rpc_async<times_factor_when_allowed>("w1", x);
  dist_autograd::backward(context, {AllowsInBackward::apply(x * 3).sum()});
  EXPECT_TRUE(at::equal(gradient_of_x(context), at::full({2}, 3.0, at::kDouble)));
  const at::Tensor loss = result.get().sum();
  dist_autograd::backward(context, {loss}, {.keep_graph = true});
  EXPECT_TRUE(at::equal(gradient_of_x(context), 3 + factor.detach()));
  const std::uint64_t before = job[0].metrics().calls_made;
  dist_autograd::backward(context, {(x * 3).sum()});
  EXPECT_EQ(job[0].metrics().calls_made, before) << "the answer said that it made no object";
}

TEST_F(DistAutogradObjectsTest, ACallThatFailsDuringABackwardHasNoPartInIt) {
  Posting order;
  posting = &order;
  Context context(job[0]);
  Future<at::Tensor> failing = job[0].rpc_async<fails_when_allowed>("w1", x);
  dist_autograd::backward(context, {AllowsInBackward::apply(x * 3).sum()});
  EXPECT_TRUE(at::equal(gradient_of_x(context), at::full({2}, 3.0, at::kDouble)));
  COHORT_EXPECT_THROW_WITH(failing.get(), DataError, "it fails late");
}

TEST_F(DistAutogradObjectsTest, AnObjectOfAHandlerThatAnswersLaterHasNoGradient) {
  Context context(job[0]);
  const auto object = job[0].remote<tuple_later>("w1", x * 2);
  const auto [argument, product, parameter] = object.to_here();
  EXPECT_FALSE(argument.requires_grad());
  EXPECT_FALSE(product.requires_grad());
  EXPECT_TRUE(at::equal(product, 2 * x.detach() * factor.detach()));
  dist_autograd::backward(context, {(parameter * x).sum()});
  EXPECT_TRUE(at::equal(gradient_of_factor("w1", context), x.detach())) << "a parameter stays itself";
}

TEST_F(DistAutogradObjectsTest, ErrorsSayWhatToDo) {
  Context context(job[0]);
  const TensorRRef failed = job[0].remote<fails_to_make_object>("w1", x);
  COHORT_EXPECT_THROW_WITH(failed.to_here(), DataError, "there is no object");
  // The object's users go backward before the program that made it ends.
  const at::Tensor y = job[0].rpc_sync<uses_its_own_object>("w1", "w1", x);
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {y.sum()}), UsageError,
                           "to_here() in place of local_value()");
  TensorRRef before;
  {
    const at::NoGradGuard not_recorded;
    before = job[0].rpc_sync<computed_before>("w1", "w1");
    EXPECT_FALSE(before.to_here().requires_grad());
  }
  COHORT_EXPECT_THROW_WITH(before.to_here(), UsageError, "has a graph that this context has not recorded");
}

TEST_F(DistAutogradObjectsTest, AGradientThatWouldGetLostIsAnError) {
  Context context(job[0]);
  const TensorRRef object = job[0].remote<times_factor>("w1", x);
  object.to_here();
  {
    Context other(job[0]);
    COHORT_EXPECT_THROW_WITH(object.to_here(), UsageError, "the value of an object of context 1 of worker 0");
    COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<sine_where_it_lies>("w1", object), UsageError,
                             "the value of an object of context 1 of worker 0");
  }
  job[0].rpc_sync<keep_argument>("w1", x * 2);
  COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<use_kept_argument>("w1"), UsageError,
                           "an argument of an earlier call");
  kept_argument.reset();
  const auto held = std::make_shared<at::Tensor>(x * 2);
  COHORT_EXPECT_THROW_WITH(job[0].make_rref(held), UsageError, "kept by pointer");
  // Before an object that nobody uses nothing is asked of the call whose result it took.
  const at::Tensor hidden = job[0].rpc_sync<times_factor>("w1", x);
  const TensorRRef unused = job[0].remote<times_factor>("w2", hidden);
  unused.to_here();
  dist_autograd::backward(context, {hidden.sum()});
  const std::uint64_t before = job[0].metrics().calls_made;
  dist_autograd::backward(context, {(x * 2).sum()});
  EXPECT_EQ(job[0].metrics().calls_made, before + 2) << "one for each object";
}

// Two shards, four micro-batches: the second shard's backward of one runs beside the first shard's of
// another.
TEST_F(DistAutogradObjectsTest, ShardsGoBackwardAtTheSameTime) {
  Context context(job[0]);
  std::vector<Future<at::Tensor>> outputs;
  for (int i = 0; i < 4; ++i) {
    const TensorRRef input = job[0].make_rref(x * (i + 1));
    const TensorRRef hidden = job[0].remote<slow_shard>("w1", input);
    outputs.push_back(job[0].rpc_async<slow_shard>("w2", hidden));
  }
  at::Tensor sum = at::zeros({2}, at::kDouble);
  for (Future<at::Tensor>& output : outputs) sum = sum + output.get();
  const auto begin = std::chrono::steady_clock::now();
  dist_autograd::backward(context, {sum.sum()});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1000))
      << "one after the other: 1200";
  EXPECT_TRUE(at::allclose(gradient_of_x(context), 10 * factor.detach().square()));
  EXPECT_TRUE(at::allclose(gradient_of_factor("w1", context), 10 * x.detach() * factor.detach()));
}

TEST_F(DistAutogradObjectsTest, ADeadOwnerEndsTheBackward) {
  Context context(job[0]);
  const TensorRRef object = job[0].remote<times_factor>("w1", x);
  const at::Tensor y = object.to_here();
  job.drop(1);
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {y.sum()}), PeerError,
                           "rpc::backward_part on w1");
}

// Of the object that nobody used its owner has no gradient.
TEST_F(DistAutogradObjectsTest, AnObjectThatNobodyUsedEndsNoBackwardAsItsOwnerDies) {
  Context context(job[0]);
  const TensorRRef object = job[0].remote<times_factor>("w1", x);
  object.when_made().get();
  drop_and_see();
  for (int i = 0; i < 2; ++i) {
    const at::Tensor y = job[0].rpc_sync<times_factor>("w2", x);
    dist_autograd::backward(context, {y.sum()});
  }
  EXPECT_TRUE(at::allclose(gradient_of_x(context), 2 * factor.detach()));
}

TEST_F(DistAutogradObjectsTest, AnObjectThatADeadWorkerWasAskedForHasNoPartInABackward) {
  drop_and_see();
  Context context(job[0]);
  const TensorRRef object = job[0].remote<times_factor>("w1", x);
  EXPECT_THROW(object.to_here(), PeerError);
  const at::Tensor y = job[0].rpc_sync<times_factor>("w2", x);
  dist_autograd::backward(context, {y.sum()});
  EXPECT_TRUE(at::allclose(gradient_of_x(context), factor.detach()));
}

// Its users' gradients are lost, so the backward must not continue without them.
TEST_F(DistAutogradObjectsTest, AnObjectThatWasPassedOnEndsTheBackwardAsItsOwnerDies) {
  Context context(job[0]);
  const TensorRRef object = job[0].remote<times_factor>("w1", x);
  const at::Tensor unused = job[0].rpc_sync<sine_of>("w2", object);
  drop_and_see();
  const at::Tensor y = job[0].rpc_sync<times_factor>("w2", x);
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {y.sum()}), PeerError,
                           "rpc::backward_part on w1");
}

TEST_F(DistAutogradObjectsTest, NothingStaysBehind) {
  {
    Context context(job[0]);
    const TensorRRef object = job[0].rpc_sync<make_by_another>("w1", "w1", "w2", x);
    const TensorRRef input = job[0].make_rref(x * 2);
    const at::Tensor y = job[0].rpc_sync<sine_of>("w2", object) + job[0].rpc_sync<sine_of>("w1", input);
    dist_autograd::backward(context, {y.sum()});
  }
  EXPECT_TRUE(comes_true([&] {
    std::size_t left = 0;
    for (std::size_t i = 0; i < 3; ++i) left += job[i].metrics().contexts + job[i].metrics().references;
    return left == 0;
  }));
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc

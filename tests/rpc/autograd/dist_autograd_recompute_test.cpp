// autograd::recompute() around remote calls: the second run makes them once more, in the backward of the
// part.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/autograd/recompute.h"
#include "cohort/base/error.h"
#include "cohort/rpc/dist_autograd.h"
#include "tests/rpc/job.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using dist_autograd::Context;
using dist_autograd::ContextId;
using test::agent_of;
using test::Job;

at::Tensor scale_weight, drop_weight;  // leaves of w2
at::Tensor scale_here;                 // of w1

at::Tensor scale_there(const at::Tensor& x) {
  return x * scale_weight;
}
at::Tensor drop_there(const at::Tensor& x) {
  return at::dropout(x * drop_weight, 0.5, /*train=*/true);
}
at::Tensor sine_of_object(const RRef<at::Tensor>& object) {
  return object.to_here().sin();
}
COHORT_REMOTE(scale_there);
COHORT_REMOTE(drop_there);
COHORT_REMOTE(sine_of_object);

template <typename Fn>
at::Tensor call_or_recompute(bool is_recomputed, const Fn& fn, const at::Tensor& x) {
  return is_recomputed ? autograd::recompute(fn, x) : fn(x);
}
at::Tensor scale_by_two(const std::string& here, bool is_recomputed, const at::Tensor& x) {
  const auto fn = [&agent = agent_of(here)](const at::Tensor& t) {
    return t * scale_here + agent.rpc_sync<scale_there>("w2", t.sin());
  };
  return call_or_recompute(is_recomputed, fn, x);
}
// The object is made, and used, within the function.
at::Tensor use_object(const std::string& here, bool is_recomputed, const at::Tensor& x) {
  const auto fn = [&agent = agent_of(here)](const at::Tensor& t) {
    const RRef<at::Tensor> made = agent.remote<scale_there>("w2", t * 2), own = agent.make_rref(t);
    return agent.rpc_sync<sine_of_object>("w0", made) + agent.rpc_sync<sine_of_object>("w0", own);
  };
  return call_or_recompute(is_recomputed, fn, x);
}
COHORT_REMOTE(scale_by_two);
COHORT_REMOTE(use_object);

std::optional<at::Tensor> gradient_of_leaf(ContextId id, const std::string& leaf) {
  const at::Tensor& wanted = leaf == "here" ? scale_here : leaf == "scale" ? scale_weight : drop_weight;
  for (const auto& [known, gradient] : dist_autograd::get_gradients(id)) {
    if (known.is_same(wanted)) return gradient;
  }
  return std::nullopt;
}
COHORT_REMOTE(gradient_of_leaf);

class DistAutogradRecomputeTest : public testing::Test {
 protected:
  DistAutogradRecomputeTest() : job_(3) {
    for (at::Tensor* const leaf : {&scale_weight, &drop_weight, &scale_here}) {
      *leaf = at::linspace(0.5, 1.5, 64).requires_grad_();
    }
  }
  ~DistAutogradRecomputeTest() override {
    job_.shutdown();
    for (at::Tensor* const leaf : {&scale_weight, &drop_weight, &scale_here}) leaf->reset();
  }
  // Undefined: the leaf has none.
  at::Tensor gradient(const Context& context, const std::string& worker, const std::string& leaf) {
    const at::NoGradGuard no_grad;
    return job_[0].rpc_sync<gradient_of_leaf>(worker, context.id(), leaf).value_or(at::Tensor());
  }
  static at::Tensor new_x() { return at::linspace(-1, 1, 64).requires_grad_(); }
  static void expect_same(const std::vector<at::Tensor>& plain, const std::vector<at::Tensor>& recomputed) {
    ASSERT_EQ(plain.size(), recomputed.size());
    for (std::size_t i = 0; i < plain.size(); ++i) {
      ASSERT_TRUE(plain[i].defined() && recomputed[i].defined()) << i;
      EXPECT_TRUE(at::equal(plain[i], recomputed[i])) << i;
    }
  }

  Job job_;
};

TEST_F(DistAutogradRecomputeTest, ACallWithinAHandlerHasTheGradientsOfThePlainCall) {
  const auto run = [&](bool is_recomputed) {
    const at::Tensor x = new_x();
    Context context(job_[0]);
    const at::Tensor y = job_[0].rpc_sync<scale_by_two>("w1", "w1", is_recomputed, x);
    dist_autograd::backward(context, {y.sum()});
    return std::vector{y.detach(), dist_autograd::get_gradients(context).at(0).second,
                       gradient(context, "w1", "here"), gradient(context, "w2", "scale")};
  };
  expect_same(run(false), run(true));
}

TEST_F(DistAutogradRecomputeTest, AnObjectThatTheFunctionMakesAndUsesGoesBackward) {
  const auto run = [&](bool is_recomputed) {
    const at::Tensor x = new_x();
    Context context(job_[0]);
    const at::Tensor y = job_[0].rpc_sync<use_object>("w1", "w1", is_recomputed, x);
    dist_autograd::backward(context, {y.sum()});
    return std::vector{y.detach(), dist_autograd::get_gradients(context).at(0).second,
                       gradient(context, "w2", "scale")};
  };
  expect_same(run(false), run(true));
}

TEST_F(DistAutogradRecomputeTest, TheSecondRunsCallsHaveTheSeedsOfTheFirst) {
  const auto run = [&](bool is_recomputed) {
    const at::Tensor x = new_x();
    Context context(job_[0], {.random = core::RandomKey{.seed = 3}});
    const auto fn = [&](const at::Tensor& t) {
      return job_[0].rpc_sync<drop_there>("w2", t.sin()) + job_[0].rpc_sync<drop_there>("w2", t);
    };
    const at::Tensor before = job_[0].rpc_sync<drop_there>("w2", x);
    const at::Tensor y = call_or_recompute(is_recomputed, fn, before);
    const at::Tensor after = job_[0].rpc_sync<drop_there>("w2", y);
    dist_autograd::backward(context, {after.sum()});
    return std::vector{after.detach(), dist_autograd::get_gradients(context).at(0).second,
                       gradient(context, "w2", "drop")};
  };
  expect_same(run(false), run(true));
}

// Without a key plain calls draw from the process's generator. recompute() leaves it alone here, as that of
// another process.
TEST_F(DistAutogradRecomputeTest, BothRunsDrawTheSameInAContextWithoutAKey) {
  for (int i = 0; i < 2; ++i) {
    Context context(job_[0]);
    const at::Tensor y = autograd::recompute(
        {.preserve_rng_state = false},
        [&](const at::Tensor& t) { return job_[0].rpc_sync<drop_there>("w2", t); }, new_x());
    dist_autograd::backward(context, {y.sum()});
    EXPECT_TRUE(at::equal(y == 0, gradient(context, "w2", "drop") == 0));
  }
}

// Calls without gradients do not count in the context, and draw all the same.
TEST_F(DistAutogradRecomputeTest, TwoRunsOfOneFunctionDrawDifferentNumbersWithoutAKey) {
  const at::Tensor x = new_x();
  const Context context(job_[0]);
  std::vector<at::Tensor> noise;
  const auto add_noise = [&](const at::Tensor& t) {
    const at::NoGradGuard no_grad;
    noise.push_back(job_[0].rpc_sync<drop_there>("w2", at::ones_like(t)));
    return t;
  };
  autograd::recompute(add_noise, autograd::recompute(add_noise, x));
  ASSERT_EQ(noise.size(), 2U);
  EXPECT_FALSE(at::equal(noise[0], noise[1]));
}

TEST_F(DistAutogradRecomputeTest, ABackwardAfterTheEndOfTheContextIsAnError) {
  const at::Tensor x = new_x();
  at::Tensor y;
  {
    const Context context(job_[0]);
    y = autograd::recompute([&](const at::Tensor& t) { return job_[0].rpc_sync<scale_there>("w2", t); }, x);
  }
  COHORT_EXPECT_THROW_WITH(y.sum().backward(), UsageError, "the context in which it made the call has ended");
}

// The thread that goes backward has a context, and the first run had none.
TEST_F(DistAutogradRecomputeTest, ARunOutsideOfContextsStaysOutside) {
  const at::Tensor x = new_x();
  const at::Tensor y = autograd::recompute(
      [&](const at::Tensor& t) { return t * 2 + job_[0].rpc_sync<scale_there>("w2", t); }, x);
  Context context(job_[0]);
  dist_autograd::backward(context, {y.sum()});
  EXPECT_TRUE(at::equal(dist_autograd::get_gradients(context).at(0).second, at::full({64}, 2.0F)));
}

}  // namespace
}  // namespace cohort::rpc

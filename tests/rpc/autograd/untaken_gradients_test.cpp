// Objects that a function hands on before it returns: their gradients reach what made them, or the backward
// says that they are lost.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "cohort/base/error.h"
#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/rref.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

using dist_autograd::Context;
using test::agent_of;
using test::comes_true;
using test::Job;
using TensorRRef = RRef<at::Tensor>;

struct HandedOn {
  TensorRRef object;  // of w3
  test::Gate is_there;
  std::function<void(Agent& maker)> before_return;
  std::uint64_t num_handled = 0;  // by the maker, before anybody knows of the object
};
HandedOn* handed_on = nullptr;

at::Tensor three_times(const at::Tensor& x) {
  return x * 3;
}
void keep_object(const TensorRRef& object) {
  handed_on->object = object;
  handed_on->is_there.open();
}
at::Tensor use_kept_object() {
  return handed_on->object.to_here() * 5;
}
at::Tensor hands_an_object_on(const std::string& here, const at::Tensor& x) {
  Agent& agent = agent_of(here);
  handed_on->num_handled = agent.metrics().calls_handled;
  agent.rpc_sync<keep_object>("w3", agent.remote<three_times>("w2", x * 2));
  if (handed_on->before_return) handed_on->before_return(agent);
  return x.detach();
}
Promise<at::Tensor>* late_result = nullptr;
Future<at::Tensor> returns_a_future(const at::Tensor& /*x*/) {
  return late_result->future();
}
COHORT_REMOTE(returns_a_future);
COHORT_REMOTE(three_times);
COHORT_REMOTE(keep_object);
COHORT_REMOTE(use_kept_object);
COHORT_REMOTE(hands_an_object_on);

class UntakenGradientsTest : public testing::Test {
 protected:
  UntakenGradientsTest() { handed_on = &state; }
  ~UntakenGradientsTest() override { handed_on = nullptr; }
  // Of x, by way of the object.
  at::Tensor backward_through_object(Context& context) {
    state.is_there.wait();
    const at::Tensor y = job[0].rpc_sync<use_kept_object>("w3");
    dist_autograd::backward(context, {y.sum()});
    for (const auto& [leaf, gradient] : dist_autograd::get_gradients(context)) {
      if (leaf.is_same(x)) return gradient;
    }
    return {};
  }

  // A death is seen after it.
  static AgentOptions short_silence() {
    AgentOptions options;
    options.silence = std::chrono::seconds(1);
    return options;
  }

  HandedOn state;
  Job job{4, short_silence()};
  const at::Tensor x = at::ones({2}).requires_grad_();
};

TEST_F(UntakenGradientsTest, AFunctionThatStillRunsGoesBackwardOnceItHasReturned) {
  state.before_return = [this](Agent& maker) {
    EXPECT_TRUE(comes_true([&] { return maker.metrics().calls_handled > state.num_handled; }))
        << "the backward's call";
  };
  Context context(job[0]);
  const TensorRRef made = job[0].remote<hands_an_object_on>("w1", "w1", x);
  const at::Tensor gradient = backward_through_object(context);
  ASSERT_TRUE(gradient.defined());
  EXPECT_TRUE(at::equal(gradient, at::full({2}, 30.0F)));
}

// Nothing of it is recorded, so a backward has nothing to wait for.
TEST_F(UntakenGradientsTest, ABackwardDoesNotWaitForAPromise) {
  Promise<at::Tensor> promise;
  late_result = &promise;
  Context context(job[0]);
  const TensorRRef late = job[0].remote<returns_a_future>("w1", x);
  const at::Tensor y = job[0].rpc_sync<three_times>("w2", x);
  dist_autograd::backward(context, {y.sum()});
  EXPECT_TRUE(at::equal(dist_autograd::get_gradients(context).at(0).second, at::full({2}, 3.0F)));
  promise.set_value(at::ones({2}));
  late.when_made().get();
}

TEST_F(UntakenGradientsTest, TheDeathOfWhoeverRanTheFunctionEndsTheBackward) {
  Context context(job[0]);
  const TensorRRef made = job[0].remote<hands_an_object_on>("w1", "w1", x);
  made.when_made().get();
  job.drop(1);
  ASSERT_TRUE(comes_true([&] {
    const at::NoGradGuard not_recorded;
    try {
      job[0].rpc_sync<three_times>("w1", x);
      return false;
    } catch (const PeerError&) {
      return true;
    }
  }));
  COHORT_EXPECT_THROW_WITH(backward_through_object(context), PeerError,
                           "gradients of 1 tensor of objects are lost: w1 is gone");
  const at::Tensor other = job[0].rpc_sync<three_times>("w2", x);
  EXPECT_NO_THROW(dist_autograd::backward(context, {other.sum()})) << "which has no object";
}

TEST_F(UntakenGradientsTest, AFunctionThatFailsAfterItHasHandedAnObjectOnEndsTheBackward) {
  state.before_return = [](Agent&) { throw DataError("test.object", "it fails late"); };
  Context context(job[0]);
  EXPECT_THROW(job[0].rpc_sync<hands_an_object_on>("w1", "w1", x), DataError);
  for (int i = 0; i < 2; ++i) {
    COHORT_EXPECT_THROW_WITH(
        backward_through_object(context), UsageError,
        "gradients of 1 tensor of objects are lost: a call that made an object did not go backward");
  }
}

}  // namespace
}  // namespace cohort::rpc

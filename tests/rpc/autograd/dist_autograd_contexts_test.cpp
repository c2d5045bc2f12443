// Contexts beside each other, several backwards, and failures: what docs/reference/rpc_parity.md names.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/internal/agent/agent_state.h"
#include "tests/rpc/autograd/waits_in_backward.h"
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
using test::WaitsInBackward;

at::Tensor shared_weight;  // a parameter of w2
at::Tensor times_shared(const at::Tensor& x) {
  return x * shared_weight;
}
at::Tensor sum_of_shared(const at::Tensor& x) {
  return (x * shared_weight).sum();
}
at::Tensor shared_parameter() {
  return shared_weight;
}
std::optional<at::Tensor> shared_gradient(ContextId id) {
  for (const auto& [leaf, gradient] : dist_autograd::get_gradients(id)) {
    if (leaf.is_same(shared_weight)) return gradient;
  }
  return std::nullopt;
}
// On w1: by a call of w2.
at::Tensor times_shared_by_two(const at::Tensor& x) {
  return agent_of("w1").rpc_sync<times_shared>("w2", x * 2);
}
bool fails_now = false;
struct FailsOnDemand : torch::autograd::Function<FailsOnDemand> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          std::vector<at::Tensor> gradients) {
    if (fails_now) throw NumericError("test.backward", "it fails on demand");
    return gradients;
  }
};
at::Tensor may_fail(const at::Tensor& x) {
  return FailsOnDemand::apply(x);
}
at::Tensor may_fail_below(const at::Tensor& x) {
  return agent_of("w1").rpc_sync<may_fail>("w2", x * 2);
}
at::Tensor waits_in_backward(const at::Tensor& x) {
  return WaitsInBackward::apply(x);
}
test::Gate* forward_gate = nullptr;
at::Tensor times_shared_when_open(const at::Tensor& x) {
  forward_gate->wait();
  return x * shared_weight;
}
bool is_within_context() {  // on w2
  return agent_of("w2").state()->is_recording();
}
std::atomic<bool> is_at_gate{false};
bool asks_w2_when_open() {  // on w1
  is_at_gate = true;
  forward_gate->wait();
  return agent_of("w1").rpc_sync<is_within_context>("w2");
}
at::Tensor first_of_two(const std::vector<at::Tensor>& list, const at::Tensor& scale) {
  return list.at(0) * scale;
}
at::Tensor sum_of_types(const at::Tensor& a, const at::Tensor& b) {
  return a * b;
}

COHORT_REMOTE(times_shared);
COHORT_REMOTE(sum_of_shared);
COHORT_REMOTE(shared_parameter);
COHORT_REMOTE(shared_gradient);
COHORT_REMOTE(times_shared_by_two);
COHORT_REMOTE(may_fail);
COHORT_REMOTE(may_fail_below);
COHORT_REMOTE(waits_in_backward);
COHORT_REMOTE(times_shared_when_open);
COHORT_REMOTE(is_within_context);
COHORT_REMOTE(asks_w2_when_open);
COHORT_REMOTE(first_of_two);
COHORT_REMOTE(sum_of_types);

at::Tensor gradient_at(const Context& context, const at::Tensor& leaf) {
  for (const auto& [known, gradient] : dist_autograd::get_gradients(context)) {
    if (known.is_same(leaf)) return gradient;
  }
  return {};
}
at::Tensor leaf_with(std::initializer_list<double> values) {
  return at::tensor(values).requires_grad_();
}

class DistAutogradContextsTest : public testing::Test {
 protected:
  DistAutogradContextsTest() { shared_weight = leaf_with({2, 3}); }
  ~DistAutogradContextsTest() override {
    shared_weight.reset();
    fails_now = false;
  }
  bool no_context_is_left() {
    return comes_true([this] {
      return job[0].metrics().contexts + job[1].metrics().contexts + job[2].metrics().contexts == 0;
    });
  }
  Job job{3};
  const at::Tensor x = leaf_with({5, 7});
};

TEST_F(DistAutogradContextsTest, SeveralContextsUseOneParameter) {
  std::vector<std::thread> trainers;
  for (std::size_t trainer = 0; trainer < 3; ++trainer) {
    trainers.emplace_back([this, trainer] {
      for (int step = 0; step < 5; ++step) {
        Context context(job[trainer]);
        const at::Tensor input = leaf_with({1.0 + static_cast<double>(trainer), 2});
        dist_autograd::backward(context, {job[trainer].rpc_sync<times_shared>("w2", input).sum()});
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(*job[trainer].rpc_sync<shared_gradient>("w2", context.id()), input.detach()));
        EXPECT_TRUE(at::equal(gradient_at(context, input), shared_weight.detach()));
      }
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
  job.shutdown();
}

TEST_F(DistAutogradContextsTest, ABackwardMayBeginAtSeveralRoots) {
  Context context(job[0]);
  const at::Tensor a = job[0].rpc_sync<times_shared>("w2", x).sum(),
                   b = job[0].rpc_sync<times_shared>("w2", x.exp()).sum(), c = (x * 4).sum();
  dist_autograd::backward(context, {a, b, c});
  EXPECT_TRUE(at::allclose(gradient_at(context, x), (1 + x.detach().exp()) * shared_weight.detach() + 4));
}

TEST_F(DistAutogradContextsTest, ABackwardMayBeginAtALossOfAnotherWorker) {
  Context context(job[0]);
  const RRef<at::Tensor> loss = job[0].remote<sum_of_shared>("w2", x);
  dist_autograd::backward(context, loss, {.keep_graph = true});
  dist_autograd::backward(context, loss);
  EXPECT_TRUE(at::equal(gradient_at(context, x), 2 * shared_weight.detach()));
  EXPECT_TRUE(at::equal(*job[0].rpc_sync<shared_gradient>("w2", context.id()), 2 * x.detach()));
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, RRef<at::Tensor>()), UsageError, "an empty RRef");
}

TEST_F(DistAutogradContextsTest, ABackwardMayBeginAtAnObjectOfItsOwnWorker) {
  Context context(job[0]);
  const at::Tensor y = job[0].rpc_sync<times_shared>("w2", x);
  const RRef<at::Tensor> loss = job[0].make_rref(y.sum());
  dist_autograd::backward(context, loss, {.keep_graph = true});
  dist_autograd::backward(context, loss);
  EXPECT_TRUE(at::equal(gradient_at(context, x), 2 * shared_weight.detach()));
  const RRef<at::Tensor> constant = job[0].make_rref(at::ones({})), several = job[0].make_rref(x);
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, constant), UsageError, "needs no gradient");
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, several), UsageError, "2 elements");
}

TEST_F(DistAutogradContextsTest, NestedCallsKeepTheirGraphForASecondBackward) {
  Context context(job[0]);
  const at::Tensor loss = job[0].rpc_sync<times_shared_by_two>("w1", x).sum();
  dist_autograd::backward(context, {loss}, {.keep_graph = true});
  dist_autograd::backward(context, {loss});
  EXPECT_TRUE(at::equal(gradient_at(context, x), 4 * shared_weight.detach()));
  EXPECT_TRUE(at::equal(*job[0].rpc_sync<shared_gradient>("w2", context.id()), 4 * x.detach()));
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {loss}), UsageError,
                           "the graph of a call is gone");
}

TEST_F(DistAutogradContextsTest, ArgumentsOfWhichSomeNeedGradients) {
  Context context(job[0]);
  const at::Tensor scale = at::tensor({2.0, 4.0}), unused = leaf_with({1, 1});
  const at::Tensor y = job[0].rpc_sync<first_of_two>("w1", std::vector<at::Tensor>{x, unused, scale}, scale);
  dist_autograd::backward(context, {y.sum()});
  EXPECT_TRUE(at::equal(gradient_at(context, x), scale));
  EXPECT_FALSE(gradient_at(context, unused).defined());
}

TEST_F(DistAutogradContextsTest, ArgumentsOfSeveralElementTypes) {
  Context context(job[0]);
  const at::Tensor single = at::tensor({0.5F, 0.25F}).requires_grad_();
  const at::Tensor y = job[0].rpc_sync<sum_of_types>("w1", single, x);
  EXPECT_EQ(y.scalar_type(), at::kDouble);
  dist_autograd::backward(context, {y.sum()});
  EXPECT_TRUE(at::equal(gradient_at(context, single), x.detach().to(at::kFloat)));
  EXPECT_TRUE(at::equal(gradient_at(context, x), single.detach().to(at::kDouble)));
}

TEST_F(DistAutogradContextsTest, AnObjectThatWasMadeBeforeTheContext) {
  const RRef<at::Tensor> parameter = job[0].remote<shared_parameter>("w2");
  parameter.to_here();
  for (int i = 0; i < 2; ++i) {
    Context context(job[0]);
    dist_autograd::backward(context, {(parameter.to_here() * x).sum()});
    EXPECT_TRUE(at::equal(*job[0].rpc_sync<shared_gradient>("w2", context.id()), x.detach()));
  }
}

TEST_F(DistAutogradContextsTest, AFailureTwoCallsBelowTheRootIsThrownThere) {
  fails_now = true;
  Context context(job[0]);
  const at::Tensor loss = job[0].rpc_sync<may_fail_below>("w1", x).sum();
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {loss}), NumericError,
                           "rpc::backward_part on w2");
}

TEST_F(DistAutogradContextsTest, ADeathTwoCallsBelowTheRootIsThrownThere) {
  Context context(job[0]);
  const at::Tensor loss = job[0].rpc_sync<times_shared_by_two>("w1", x).sum();
  job.drop(2);
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {loss}), PeerError, "rpc::backward_part on w2");
}

TEST_F(DistAutogradContextsTest, ABackwardAfterOneThatFailed) {
  Context context(job[0]);
  const at::Tensor loss = job[0].rpc_sync<may_fail>("w1", x).sum();
  fails_now = true;
  for (int i = 0; i < 3; ++i) {
    COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {loss}, {.keep_graph = true}), NumericError,
                             "it fails on demand");
  }
  fails_now = false;
  dist_autograd::backward(context, {loss}, {.keep_graph = true});
  EXPECT_TRUE(at::equal(gradient_at(context, x), at::ones({2}, at::kDouble)));
}

TEST_F(DistAutogradContextsTest, AResultThatComesAfterTheEndHasNoGradient) {
  for (const char* const worker : {"w0", "w1"}) {
    test::Gate gate;
    forward_gate = &gate;
    Future<at::Tensor> result;
    {
      Context context(job[0]);
      result = job[0].rpc_async<times_shared_when_open>(worker, x);
    }
    gate.open();
    EXPECT_FALSE(result.get().requires_grad()) << worker;
  }
}

TEST_F(DistAutogradContextsTest, ACallOfAHandlerAfterTheEndBelongsToNoContext) {
  test::Gate gate;
  forward_gate = &gate;
  is_at_gate = false;
  Future<bool> result;
  {
    Context context(job[0]);
    EXPECT_TRUE(job[0].rpc_sync<is_within_context>("w2"));
    result = job[0].rpc_async<asks_w2_when_open>("w1");
    EXPECT_TRUE(comes_true([] { return is_at_gate.load(); }));
  }
  EXPECT_TRUE(no_context_is_left()) << "the handler still runs";
  gate.open();
  EXPECT_FALSE(result.get());
  EXPECT_EQ(job[2].metrics().contexts, 0U);
  job.shutdown();
}

// Calls of a channel wait for each other. The handler of the second begins when 300 further contexts have
// ended.
TEST_F(DistAutogradContextsTest, ACallThatBeginsLongAfterTheEndLeavesNoContext) {
  test::Gate gate;
  forward_gate = &gate;
  std::vector<Future<at::Tensor>> results;
  {
    Context context(job[0]);
    for (int i = 0; i < 2; ++i) {
      results.push_back(job[0].rpc_async<times_shared_when_open>(to("w1").in_order("updates"), x));
    }
  }
  for (int i = 0; i < 300; ++i) {
    Context context(job[0]);
    job[0].rpc_sync<times_shared>("w1", x);
  }
  gate.open();
  for (Future<at::Tensor>& result : results) EXPECT_FALSE(result.get().requires_grad());
  EXPECT_TRUE(no_context_is_left());
  job.shutdown();
}

// w2 was called by w1 alone, which dies. So w0 tells w2 of the end, and not earlier.
TEST_F(DistAutogradContextsTest, AWorkerWhoseCallerHasDiedLearnsOfTheEnd) {
  {
    Context context(job[0]);
    EXPECT_TRUE(job[0].rpc_sync<times_shared_by_two>("w1", x).requires_grad());
    job.drop(1);
    EXPECT_EQ(job[2].metrics().contexts, 1U);
  }
  EXPECT_TRUE(comes_true([&] { return job[0].metrics().contexts + job[2].metrics().contexts == 0; }));
}

// Of the worker that began it: its thread ends, and with it the context, while a part still goes backward
// elsewhere.
TEST_F(DistAutogradContextsTest, AContextMayEndDuringItsBackward) {
  test::Gate gate;
  WaitsInBackward::gate = &gate;
  {
    auto context = std::make_unique<Context>(job[0]);
    const at::Tensor loss = job[0].rpc_sync<waits_in_backward>(to("w1"), x).sum();
    WaitsInBackward::has_begun = false;
    std::jthread ends([&] {
      EXPECT_TRUE(comes_true([] { return WaitsInBackward::has_begun.load(); }));
      job[0].state()->end_context(context->id());
      EXPECT_TRUE(comes_true([&] { return job[1].metrics().contexts == 0; }));
      gate.open();
    });
    dist_autograd::backward(*context, {loss});
    ends.join();
    EXPECT_TRUE(at::equal(gradient_at(*context, x), at::ones({2}, at::kDouble)));
  }
  EXPECT_TRUE(comes_true([&] { return job[0].metrics().contexts + job[1].metrics().contexts == 0; }));
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc

// A backward that fails ends on all workers that take part in it: Note [Failed backwards].
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/autograd/detached_graph.h"
#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
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

test::Gate* held_gate = nullptr;     // of what lasts
test::Gate* failure_gate = nullptr;  // of what fails

struct FailsAtGate : torch::autograd::Function<FailsAtGate> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          std::vector<at::Tensor> /*gradients*/) {
    failure_gate->wait();
    throw NumericError("test.backward", "it fails at the gate");
  }
};

// Its backward says that the first backward of its context has failed elsewhere.
struct HearsOfFailure : torch::autograd::Function<HearsOfFailure> {
  static inline ContextState* context = nullptr;

  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          std::vector<at::Tensor> gradients) {
    context->fail(1, std::make_exception_ptr(NumericError("test.backward", "it fails elsewhere")));
    return gradients;
  }
};
// Its backward counts how often it runs.
struct CountsBackwards : torch::autograd::Function<CountsBackwards> {
  static inline std::atomic<int> num_backwards{0};

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->set_materialize_grads(false);
    return x + 0;
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          std::vector<at::Tensor> gradients) {
    ++num_backwards;
    return gradients;
  }
};

at::Tensor held_in_backward(const at::Tensor& x) {
  return WaitsInBackward::apply(x);
}
at::Tensor held_in_forward(const at::Tensor& x) {
  held_gate->wait();
  return x * 2;
}
at::Tensor fails_at_gate(const at::Tensor& x) {
  return FailsAtGate::apply(x);
}
// On w2, which has the weight.
at::Tensor& weight() {
  static at::Tensor tensor = at::ones({2}).requires_grad_();
  return tensor;
}
at::Tensor times_weight_of_w2(const at::Tensor& x) {
  return x * weight();
}
// On w1: its backward waits, and then calls w2.
at::Tensor held_above(const at::Tensor& x) {
  return WaitsInBackward::apply(agent_of("w1").rpc_sync<times_weight_of_w2>("w2", x));
}
// On w2: its backward waits for the worker that is called.
at::Tensor held_below(const at::Tensor& x, const std::string& worker) {
  return agent_of("w2").rpc_sync<held_in_backward>(worker, x * 2);
}

at::Tensor doubled(const at::Tensor& x) {
  return x * 2;
}

COHORT_REMOTE(times_weight_of_w2);
COHORT_REMOTE(doubled);
COHORT_REMOTE(held_above);
COHORT_REMOTE(held_in_backward);
COHORT_REMOTE(held_in_forward);
COHORT_REMOTE(fails_at_gate);
COHORT_REMOTE(held_below);

// Its backward notes the number by which the context knows it.
struct NotesNumber : torch::autograd::Function<NotesNumber> {
  static inline ContextState* context = nullptr;
  static inline std::vector<std::uint64_t> numbers;

  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          std::vector<at::Tensor> gradients) {
    numbers.push_back(context->current_backward().number);
    return gradients;
  }
};

std::string error_of_first_backward(ContextState& context) {
  std::string text;
  context.failures()->on_failure(1, [&](const std::exception_ptr& error) {
    text = base::concat(describe_exception(error).type, " ", describe_exception(error).text);
  });
  return text;
}

class DistAutogradFailuresTest : public testing::Test {
 protected:
  DistAutogradFailuresTest() {
    WaitsInBackward::has_begun = false;
    WaitsInBackward::gate = held_gate = &held;
    failure_gate = &failure;
  }
  // Goes backward on a thread of its own, through `root`, and through w2, whose part waits for a part on
  // `holder`.
  template <typename Root>
  void begin_backward(const std::string& holder, Root root) {
    thread = std::thread([this, holder, root] {
      try {
        Context context(job[0]);
        const at::Tensor x = at::ones({2}).requires_grad_();
        const at::Tensor loss = root(x).sum() + job[0].rpc_sync<held_below>("w2", x, holder).sum();
        on_w2 = job[2].state()->contexts().find(context.id());
        dist_autograd::backward(context, {loss});
      } catch (const std::exception& error) {
        error_of_root = base::message_of(error);
      }
      has_ended = true;
    });
    EXPECT_TRUE(comes_true([] { return WaitsInBackward::has_begun.load(); }));
  }
  void expect_end(const std::string& on_root, const std::string& on_w2_too) {
    EXPECT_TRUE(comes_true([&] { return has_ended && on_w2->num_running() == 0; })) << "while a part is held";
    const std::string text = error_of_first_backward(*on_w2);
    held.open();
    thread.join();
    EXPECT_NE(error_of_root.find(on_root), std::string::npos) << error_of_root;
    EXPECT_NE(text.find(on_w2_too), std::string::npos) << text;
  }

  test::Gate held, failure;
  Job job{3};
  std::shared_ptr<ContextState> on_w2;
  std::string error_of_root;
  std::atomic<bool> has_ended{false};
  std::thread thread;
};

TEST_F(DistAutogradFailuresTest, AFailureOfAWorkerEndsThePartThatWaitsOnAnother) {
  begin_backward("w0", [this](const at::Tensor& x) { return job[0].rpc_sync<fails_at_gate>("w1", x); });
  failure.open();
  expect_end("rpc::backward_part on w1", "rpc::backward_part on w1");
  EXPECT_TRUE(comes_true([this] {
    return job[0].metrics().contexts + job[1].metrics().contexts + job[2].metrics().contexts == 0;
  }));
  job.shutdown();
}

TEST_F(DistAutogradFailuresTest, AFailureOfTheRootItselfEndsThePartThatWaits) {
  begin_backward("w1", fails_at_gate);
  failure.open();
  expect_end("it fails at the gate", "NumericError [rpc.call] rpc::backward_part for w0");
  job.shutdown();
}

TEST_F(DistAutogradFailuresTest, TheDeathOfTheRootEndsThePartThatWaits) {
  begin_backward("w1", [](const at::Tensor& x) { return x * 2; });
  job.drop(0);
  expect_end("this agent has been stopped", "rpc::backward_part for w0");
}

// The backward waits for a call that its program has not waited for, as that call may make an object.
TEST_F(DistAutogradFailuresTest, AFailureEndsTheWaitForACallThatStillRuns) {
  failure.open();
  Context context(job[0]);
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor loss = job[0].rpc_sync<fails_at_gate>("w1", x).sum();
  const Future<at::Tensor> late = job[0].rpc_async<held_in_forward>("w2", x);
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {loss}), NumericError,
                           "rpc::backward_part on w1");
  EXPECT_FALSE(late.ready());
  held.open();
}

// The failure is known before the turn of that call comes. It is not one of the call.
TEST_F(DistAutogradFailuresTest, ABackwardThatHasFailedDoesNotContinueWithoutACallThatStillRuns) {
  Context context(job[0]);
  const std::shared_ptr<ContextState> state = job[0].state()->contexts().find(context.id());
  HearsOfFailure::context = state.get();
  CountsBackwards::num_backwards = 0;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const Future<at::Tensor> late = job[0].rpc_async<held_in_forward>("w2", CountsBackwards::apply(x));
  COHORT_EXPECT_THROW_WITH(dist_autograd::backward(context, {HearsOfFailure::apply(x).sum()}), NumericError,
                           "it fails elsewhere");
  EXPECT_EQ(CountsBackwards::num_backwards, 0) << "a node before the call";
  EXPECT_FALSE(late.ready());
  held.open();
}

// No node makes a call or waits after the failure.
TEST_F(DistAutogradFailuresTest, ABackwardThatFailsElsewhereAtItsEndFails) {
  Context context(job[0]);
  const std::shared_ptr<ContextState> state = job[0].state()->contexts().find(context.id());
  HearsOfFailure::context = state.get();
  const at::Tensor x = at::ones({2}).requires_grad_();
  COHORT_EXPECT_THROW_WITH(
      dist_autograd::backward(context, {HearsOfFailure::apply(x).sum()}, {.into_grad = true}), NumericError,
      "it fails elsewhere");
}

TEST_F(DistAutogradFailuresTest, NoPartOfABackwardThatHasFailedBegins) {
  ContextState context(ContextId{0, 1}, 1, {});
  const auto error_of = [](const char* text) { return std::make_exception_ptr(NumericError("test", text)); };
  int num_failures = 0;
  context.failures()->on_failure(2, [&](const std::exception_ptr&) { ++num_failures; });
  context.failures()->on_failure(3, [&](const std::exception_ptr&) { num_failures += 10; });
  context.fail(2, error_of("the first error"));
  context.fail(2, error_of("the second error"));
  EXPECT_EQ(num_failures, 1);
  COHORT_EXPECT_THROW_WITH(context.backward_part({1, 1}, {2, false}, {}), NumericError, "the first error");
  EXPECT_TRUE(context.backward_part({1, 1}, {3, false}, {}).empty());
}

// A part may outlast its backward, and begin after it.
TEST_F(DistAutogradFailuresTest, BackwardsKeepTheirNumbersWhilePartsOfEarlierOnesRun) {
  ContextState context(ContextId{0, 1}, 1, {});
  NotesNumber::context = &context;
  NotesNumber::numbers.clear();
  const auto backward = [&](const at::Tensor& root) { context.backward({root}, {}, {}); };
  const at::Tensor x = at::ones({1}).requires_grad_();
  std::thread first([&] { backward(WaitsInBackward::apply(NotesNumber::apply(x)).sum() * 1); });
  EXPECT_TRUE(comes_true([] { return WaitsInBackward::has_begun.load(); }));
  backward(NotesNumber::apply(x).sum());
  EXPECT_TRUE(context.backward_part({1, 1}, {1, false}, {}).empty()) << "there is no such part";
  backward(NotesNumber::apply(x).sum());
  held.open();
  first.join();
  EXPECT_EQ(NotesNumber::numbers, (std::vector<std::uint64_t>{2, 3, 1}));
}

// The part on w1 is held as the first backward fails. It must not become a part of the second one.
TEST_F(DistAutogradFailuresTest, APartOfABackwardThatFailedGivesNoGradientToTheNext) {
  Context context(job[0]);
  const at::Tensor x = at::ones({2}).requires_grad_();
  // The latest node goes backward first: the part on w1 is called before the root waits at the gate.
  const at::Tensor fails_here = fails_at_gate(x).sum();
  const at::Tensor fails = fails_here + job[0].rpc_sync<held_above>("w1", x).sum();
  const at::Tensor succeeds = job[0].rpc_sync<doubled>("w1", x).sum();
  const std::shared_ptr<ContextState> on_w1 = job[1].state()->contexts().find(context.id());
  on_w2 = job[2].state()->contexts().find(context.id());
  thread = std::thread([this] {
    EXPECT_TRUE(comes_true([] { return WaitsInBackward::has_begun.load(); }));
    failure.open();
  });
  EXPECT_THROW(dist_autograd::backward(context, {fails}), NumericError);
  thread.join();
  EXPECT_TRUE(comes_true([&] {  // w1 knows
    try {
      on_w1->backward_part({9, 9}, {1, false}, {});
    } catch (const std::exception&) {
      return true;
    }
    return false;
  }));
  dist_autograd::backward(context, {succeeds});
  held.open();
  EXPECT_TRUE(comes_true([&] { return on_w1->num_running() == 0; }));
  EXPECT_TRUE(on_w2->gradients().empty()) << "no gradient of a loss that succeeded leads there";
  job.shutdown();
}

// What a worker has of an object that was made in the context: two parts use it.
struct ObjectHere {
  ObjectHere() {
    ContextState::CallRecord maker, fetch;
    maker.path = {0};
    maker.values = {value};
    context.add_record(kMaker, std::move(maker));
    fetch.path = {2};
    fetch.fetched = {value};
    context.add_record(kFetch, std::move(fetch));
  }
  // Another user. Its backward waits at the gate of WaitsInBackward.
  void add_held_user() {
    ContextState::CallRecord held;
    held.path = {1};
    held.graph = std::make_shared<autograd::DetachedGraph>(std::vector<at::Tensor>());
    held.graph->end({WaitsInBackward::apply(value)});
    context.add_record(kHeld, std::move(held));
  }
  std::vector<at::Tensor> go_backward(ContextState::CallKey key, std::uint64_t backward, float gradient) {
    const at::Tensor of_result = at::full({1}, gradient);
    return context.backward_part(key, {backward, /*keep_graph=*/true},
                                 key == kMaker ? std::vector<at::Tensor>() : std::vector{of_result});
  }
  // The late call, at the end of a backward.
  void expect_gradient(std::uint64_t backward, float gradient) {
    const std::vector<at::Tensor> of_maker = go_backward(kMaker, backward, 0);
    ASSERT_EQ(of_maker.size(), 1U);
    EXPECT_EQ(of_maker[0].item<float>(), gradient);
    EXPECT_EQ(context.take_untaken(backward).count, 0);
    EXPECT_TRUE(context.gradients().empty());
  }

  static constexpr ContextState::CallKey kMaker{0, 1}, kHeld{0, 2}, kFetch{0, 3};
  ContextState context{ContextId{0, 1}, 1, {}};
  const at::Tensor value = at::ones({1}).requires_grad_();
};

// Whether the worker knows of the failure before the part ends, or not.
TEST_F(DistAutogradFailuresTest, APartThatOutlastsItsBackwardLeavesNothingForAnObject) {
  for (const bool is_known : {true, false}) {
    test::Gate gate;
    WaitsInBackward::gate = &gate;
    WaitsInBackward::has_begun = false;
    ObjectHere object;
    object.add_held_user();
    std::thread first([&] {
      if (is_known) {
        EXPECT_THROW(object.go_backward(ObjectHere::kHeld, 1, 1), NumericError);
      } else {
        EXPECT_NO_THROW(object.go_backward(ObjectHere::kHeld, 1, 1));
      }
    });
    EXPECT_TRUE(comes_true([] { return WaitsInBackward::has_begun.load(); }));
    if (is_known) {
      object.context.fail(1, std::make_exception_ptr(NumericError("test", "it fails elsewhere")));
    }
    object.go_backward(ObjectHere::kFetch, 2, 10);
    gate.open();
    first.join();
    object.expect_gradient(2, 10);
  }
}

// It fails elsewhere before the object's own call goes backward, and nobody tells this worker.
TEST_F(DistAutogradFailuresTest, AnObjectsGradientsOfABackwardThatFailedAreDropped) {
  ObjectHere object;
  object.go_backward(ObjectHere::kFetch, 1, 1);
  EXPECT_TRUE(object.context.gradients().empty());
  object.go_backward(ObjectHere::kFetch, 2, 10);
  object.expect_gradient(2, 10);
}

}  // namespace
}  // namespace cohort::rpc

// What a thread that goes backward may wait for: each wait ends once the backward fails elsewhere. Note
// [Failed backwards].
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "cohort/autograd/recompute.h"
#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/rpc/dist_autograd.h"
#include "cohort/rpc/internal/agent/agent_state.h"
#include "cohort/rpc/remote_module.h"
#include "tests/rpc/job.h"
#include "tests/support/comes_true.h"
#include "tests/support/gate.h"

namespace cohort::rpc {
namespace {

using dist_autograd::Context;
using test::agent_of;
using test::comes_true;
using test::Gate;
using test::Job;

// What a test holds back.
struct Held {
  Gate gate, failure;
  std::atomic<int> num_until_held{-1};  // calls before the one that is held; negative: none is
  std::atomic<int> num_held{0}, num_stopped{0};
  Promise<at::Tensor> promise;
};
Held* held_now = nullptr;

at::Tensor held_call(const at::Tensor& x) {
  if (held_now->num_until_held >= 0 && held_now->num_until_held-- == 0) {
    const std::stop_callback on_stop(stop_token(), [] { ++held_now->num_stopped; });
    ++held_now->num_held;
    held_now->gate.wait();
  }
  return x * 2;
}
struct FailsOnceHeld : torch::autograd::Function<FailsOnceHeld> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          std::vector<at::Tensor> /*gradients*/) {
    held_now->failure.wait();
    throw NumericError("test.waits", "it fails elsewhere");
  }
};
at::Tensor fails_once_held(const at::Tensor& x) {
  return FailsOnceHeld::apply(x);
}
struct HeldModule : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    ++num_forwards;
    return held_call(x);
  }
  std::atomic<int> num_forwards{0};
};
std::shared_ptr<HeldModule> make_held_module() {
  return std::make_shared<HeldModule>();
}

using Wait = std::function<at::Tensor(Agent& agent, const at::Tensor& x)>;
at::Tensor recomputed(Agent& agent, const Wait& wait, const at::Tensor& x) {
  return autograd::recompute([&agent, wait](const at::Tensor& t) { return wait(agent, t); }, x);
}
at::Tensor nested(Agent& agent, int depth, const at::Tensor& x) {
  const auto fn = [&agent, depth](const at::Tensor& t) {
    return depth == 1 ? agent.rpc_sync<held_call>("w2", t) : nested(agent, depth - 1, t);
  };
  return autograd::recompute(fn, x);
}
// The backward of its results waits on the worker of `agent`.
const std::map<std::string, Wait>& waits() {
  static const std::map<std::string, Wait> all{
      {"a call", [](Agent& agent, const at::Tensor& x) { return agent.rpc_sync<held_call>("w2", x); }},
      {"one of several calls",
       [](Agent& agent, const at::Tensor& x) {
         return wait_all(std::vector{agent.rpc_async<held_call>("w2", x),
                                     agent.rpc_async<held_call>(Target("w2").in_order("a"), x)})[0];
       }},
      {"the value of an object",
       [](Agent& agent, const at::Tensor& x) { return agent.remote<held_call>("w2", x).to_here(); }},
      {"an object that is made here",
       [](Agent& agent, const at::Tensor& x) {
         return x * *agent.remote<held_call>(agent.self().name, x.detach()).local_value();
       }},
      {"an object that is to be made",
       [](Agent& agent, const at::Tensor& x) {
         agent.remote<held_call>("w2", x.detach()).when_made().get();
         return x * 2;
       }},
      {"a module",
       [](Agent& agent, const at::Tensor& x) {
         return remote_module<make_held_module>(agent, "w2").forward(x);
       }},
      {"a promise",
       [](Agent&, const at::Tensor& x) {
         if (held_now->num_until_held < 0) return x * 2;
         Future<at::Tensor> future = held_now->promise.future();
         ++held_now->num_held;
         return x * future.get();
       }},
      {"the backward of another context",
       [](Agent& agent, const at::Tensor& x) {
         Context inner(agent);
         const at::Tensor y = x.detach().requires_grad_();
         const auto fn = [&](const at::Tensor& t) { return agent.rpc_sync<held_call>("w2", t); };
         dist_autograd::backward(inner, {autograd::recompute(fn, y).sum()});
         return x * 2;
       }},
  };
  return all;
}

at::Tensor with_hook(const std::string& here, const at::Tensor& x) {
  const at::Tensor y = x * 2;
  y.register_hook(
      [here](const at::Tensor& gradient) { return agent_of(here).rpc_sync<held_call>("w2", gradient); });
  return y * 1;
}
at::Tensor waits_in_second_run(const std::string& here, const std::string& wait, const at::Tensor& x) {
  return wait == "a hook" ? with_hook(here, x) : recomputed(agent_of(here), waits().at(wait), x);
}

COHORT_REMOTE(held_call);
COHORT_REMOTE(fails_once_held);
COHORT_REMOTE(make_held_module);
COHORT_REMOTE_MODULE(HeldModule);
COHORT_REMOTE(waits_in_second_run);

class DistAutogradWaitTest : public testing::Test {
 protected:
  DistAutogradWaitTest() { held_now = &held_; }
  // Where a backward begins on w0, waits on `waiting`, and fails on w1.
  void expect_end(const std::string& waiting, const std::function<at::Tensor(const at::Tensor&)>& fn,
                  int num_until_held = 0) {
    std::string error;
    std::atomic<bool> has_ended{false};
    std::shared_ptr<ContextState> there;
    std::thread thread([&] {
      try {
        Context context(job_[0]);
        const at::Tensor x = at::ones({2}).requires_grad_();
        const at::Tensor loss = fn(x).sum() + job_[0].rpc_sync<fails_once_held>("w1", x).sum();
        if (waiting != "w0") there = job_[3].state()->contexts().find(context.id());
        held_.num_until_held = num_until_held;
        dist_autograd::backward(context, {loss});
      } catch (const std::exception& thrown) {
        error = base::message_of(thrown);
      }
      has_ended = true;
    });
    EXPECT_TRUE(comes_true([&] { return held_.num_held > 0 || has_ended; }));
    held_.failure.open();
    EXPECT_TRUE(comes_true([&] { return has_ended && (there == nullptr || there->num_running() == 0); }))
        << "while the result is held";
    if (is_asked_to_stop_) EXPECT_TRUE(comes_true([&] { return held_.num_stopped == 1; }));
    held_.num_until_held = -1;
    held_.gate.open();
    held_.promise.set_value(at::ones({2}));
    thread.join();
    EXPECT_EQ(held_.num_held, 1);
    EXPECT_NE(error.find("it fails elsewhere"), std::string::npos) << error;
    job_.shutdown();
  }

  Held held_;
  bool is_asked_to_stop_ = false;  // what is held
  Job job_{4};
};

class DistAutogradWaitsTest : public DistAutogradWaitTest, public testing::WithParamInterface<std::string> {
 protected:
  // The other context calls in its forward first.
  static int num_until_held() { return GetParam() == "the backward of another context" ? 1 : 0; }
};

TEST_P(DistAutogradWaitsTest, EndsWhereTheRootWaits) {
  expect_end(
      "w0", [](const at::Tensor& x) { return waits_in_second_run("w0", GetParam(), x); }, num_until_held());
}

TEST_P(DistAutogradWaitsTest, EndsWhereAPartWaits) {
  expect_end(
      "w3",
      [this](const at::Tensor& x) {
        return job_[0].rpc_sync<waits_in_second_run>("w3", "w3", GetParam(), x);
      },
      num_until_held());
}

INSTANTIATE_TEST_SUITE_P(Waits, DistAutogradWaitsTest,
                         testing::Values("a call", "one of several calls", "the value of an object",
                                         "an object that is made here", "an object that is to be made",
                                         "a module", "a promise", "the backward of another context",
                                         "a hook"),
                         [](const testing::TestParamInfo<std::string>& info) {
                           std::string name = info.param;
                           std::erase(name, ' ');
                           return name;
                         });

// LibTorch runs it on a thread of its own.
TEST_F(DistAutogradWaitTest, OfARecomputeDeepWithinOthersEnds) {
  constexpr int kDepth = 64;
  expect_end("w0", [this](const at::Tensor& x) { return nested(job_[0], kDepth, x); }, kDepth - 1);
}

TEST_F(DistAutogradWaitTest, TheCallThatIsWaitedForIsAskedToStop) {
  is_asked_to_stop_ = true;
  expect_end("w0", [this](const at::Tensor& x) { return recomputed(job_[0], waits().at("a call"), x); });
}

// As a program does that polls in a hook.
TEST(BackwardWaitTest, AWaitThatEndsWithoutAResultLeavesNothing) {
  const auto failures = std::make_shared<BackwardFailures>();
  const BackwardScope scope(failures, 1);
  const base::Promise<void> promise("a result of the test");
  const base::Future<void> result = promise.future();
  for (const int milliseconds : {0, 3}) {
    wait_in_backward(result, base::Deadline(std::chrono::milliseconds(milliseconds)));
    EXPECT_EQ(failures->num_waiting(), 0U) << milliseconds;
  }
}

// As a program does whose hook asks another worker again and again: its backward may last.
TEST_F(DistAutogradWaitTest, AnsweredCallsOfABackwardLeaveNothing) {
  const auto failures = std::make_shared<BackwardFailures>(), inner = std::make_shared<BackwardFailures>();
  const BackwardScope scope(failures, 1);
  for (int i = 0; i < 3; ++i) job_[0].rpc_sync<held_call>("w2", at::ones({1}));
  EXPECT_TRUE(comes_true([&] { return failures->num_waiting() == 0; })) << failures->num_waiting();
  {
    const BackwardScope within(inner, 1);
    EXPECT_EQ(failures->num_waiting(), 1U);
  }
  EXPECT_EQ(failures->num_waiting(), 0U);
  job_.shutdown();
}

TEST_F(DistAutogradWaitTest, AnsweredGradientsOfABackwardLeaveNothing) {
  Context context(job_[0]);
  const std::shared_ptr<ContextState> here = job_[0].state()->contexts().find(context.id());
  const at::Tensor y = job_[0].rpc_sync<held_call>("w1", at::ones({1}).requires_grad_());
  std::size_t num_waiting = 1;
  y.register_hook([&](const at::Tensor& /*gradient*/) { num_waiting = here->failures()->num_waiting(); });
  dist_autograd::backward(context, {job_[0].rpc_sync<held_call>("w2", y).sum()});
  EXPECT_EQ(num_waiting, 0U);
  job_.shutdown();
}

TEST_F(DistAutogradWaitTest, NoCallBeginsAfterTheFailure) {
  const auto failures = std::make_shared<BackwardFailures>();
  const BackwardScope scope(failures, 2);
  held_.num_until_held = 0;
  failures->fail(1, std::make_exception_ptr(NumericError("test.waits", "an earlier one")));
  EXPECT_EQ(BackwardScope::current()->error(), nullptr);
  failures->fail(2, std::make_exception_ptr(NumericError("test.waits", "the second one")));
  Future<at::Tensor> call = job_[0].rpc_async<held_call>("w2", at::ones({1}));
  EXPECT_TRUE(call.ready());
  EXPECT_THROW(call.get(), NumericError);
  const std::vector objects{job_[0].remote<held_call>("w2", at::ones({1})),
                            job_[0].remote<held_call>("w0", at::ones({1}))};
  {
    const BackwardScope none(nullptr);
    held_.gate.open();
    EXPECT_EQ(job_[0].rpc_sync<held_call>("w2", at::ones({1})).item<float>(), 2);
    for (const RRef<at::Tensor>& object : objects) EXPECT_THROW(object.to_here(), NumericError);
  }
  EXPECT_EQ(held_.num_held, 1) << "that of the thread without a backward";
  job_.shutdown();
}

}  // namespace
}  // namespace cohort::rpc

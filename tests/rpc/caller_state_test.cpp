// What a handler takes over from its caller's thread: gradient mode, autocast and seeds.
#include "cohort/rpc/internal/caller_state.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/core/random_scope.h"
#include "cohort/optim/autocast.h"
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

bool narrows_here() {
  return at::autocast::is_autocast_enabled(at::kCPU);
}

TEST(CallerStateTest, AScopeSetsWhatCameAndPutsBackWhatWas) {
  CallerState state;
  {
    const at::NoGradGuard no_grad;
    const optim::Autocast autocast(at::kCPU, at::kHalf);
    state = CallerState::of_next_call();
  }
  EXPECT_FALSE(state.grad_mode);
  ASSERT_EQ(state.autocast.size(), 1U);
  EXPECT_FALSE(state.seed.has_value());
  Writer out;
  encode(out, state);
  const Encoded encoded = out.take();
  Reader in(encoded);
  const auto came = decode<CallerState>(in);
  in.finish();
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  try {
    const CallerStateScope scope(came);
    EXPECT_FALSE(at::GradMode::is_enabled());
    EXPECT_TRUE(narrows_here());
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kHalf);
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    throw DataError("test.handler", "it fails");
  } catch (const DataError&) {
  }
  EXPECT_TRUE(at::GradMode::is_enabled());
  EXPECT_FALSE(narrows_here());
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), dtype);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
}

TEST(CallerStateTest, NothingTravelsOfAThreadWithoutAny) {
  const CallerState state = CallerState::of_next_call();
  EXPECT_TRUE(state.grad_mode);
  EXPECT_TRUE(state.autocast.empty());
  EXPECT_FALSE(state.seed.has_value());
  const c10::InferenceMode inference;
  EXPECT_FALSE(CallerState::of_next_call().grad_mode);
}

TEST(CallerStateTest, AnAutocastThatNobodySendsIsAnError) {
  const auto to_float = static_cast<std::int8_t>(at::kFloat);
  for (const AutocastOn on : {AutocastOn{99, to_float}, AutocastOn{-1, to_float},
                              AutocastOn{0, static_cast<std::int8_t>(at::kLong)}, AutocastOn{0, 127}}) {
    CallerState state;
    state.autocast = {on};
    COHORT_EXPECT_THROW_WITH(CallerStateScope{state}, CommError, "a call comes with autocast");
    EXPECT_FALSE(narrows_here());
  }
}

// As on a thread that waits in the second run of autograd::recompute(), and runs a handler meanwhile.
TEST(CallerStateTest, AHandlerDoesNotDrawFromWhatStandsForTheGlobalGenerator) {
  at::Generator copy = at::make_generator<at::CPUGeneratorImpl>(5);
  const at::Tensor before = copy.get_state();
  {
    const core::RandomScope second_run(copy, copy);
    const CallerStateScope handler({});
    at::rand({4});
    at::rand({4}, at::detail::getDefaultCPUGenerator());
  }
  EXPECT_TRUE(at::equal(before, copy.get_state()));
}

TEST(CallerStateTest, SeedsFollowFromTheSeedAndTheOrderOfCalls) {
  const auto three = [](std::uint64_t seed) {
    const SeedScope scope(seed);
    std::vector<std::uint64_t> seeds;
    for (int i = 0; i < 3; ++i) seeds.push_back(SeedScope::next().value());
    return seeds;
  };
  const std::vector<std::uint64_t> of_7 = three(7);
  EXPECT_EQ(of_7, three(7));
  EXPECT_NE(of_7, three(8));
  EXPECT_NE(of_7[0], of_7[1]);
  EXPECT_FALSE(SeedScope::next().has_value());
  auto outer = std::make_unique<SeedScope>(std::uint64_t{7}),
       inner = std::make_unique<SeedScope>(std::nullopt);
  EXPECT_FALSE(SeedScope::next().has_value()) << "the newest scope counts";
  inner = std::make_unique<SeedScope>(std::uint64_t{8});
  outer.reset();
  EXPECT_EQ(SeedScope::next(), three(8)[0]);
  inner.reset();
  EXPECT_FALSE(SeedScope::next().has_value());
}

at::Tensor narrow_layer;  // the weight of a linear layer
at::Tensor apply_layer(const at::Tensor& x) {
  return at::linear(x, narrow_layer);
}
at::Tensor apply_layer_twice(const at::Tensor& x) {
  return at::linear(at::linear(x, narrow_layer).relu(), narrow_layer);
}
std::optional<at::Tensor> layer_gradient(ContextId id) {
  for (const auto& [leaf, gradient] : dist_autograd::get_gradients(id)) {
    if (leaf.is_same(narrow_layer)) return gradient;
  }
  return std::nullopt;
}
// Whether autocast is on, and to which type: here, and below on w2.
using Narrowing = std::vector<std::tuple<bool, at::ScalarType>>;
Narrowing narrowing(const std::string& here) {
  Narrowing of_all;
  of_all.emplace_back(narrows_here(), at::autocast::get_autocast_dtype(at::kCPU));
  if (here == "w1") of_all.push_back(agent_of(here).rpc_sync<narrowing>("w2", "w2").at(0));
  return of_all;
}
void fails_at_once() {
  throw DataError("test.handler", "it fails");
}
std::tuple<bool, bool, at::Tensor> gradients_are_on(const at::Tensor& x) {
  return {(narrow_layer * 2).requires_grad(), x.is_inference(), x * 2};
}
std::atomic<int> num_narrow_backwards{0};
struct LooksAtAutocast : torch::autograd::Function<LooksAtAutocast> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x + 0; }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          std::vector<at::Tensor> gradients) {
    if (narrows_here()) ++num_narrow_backwards;
    return gradients;
  }
};
at::Tensor looks_at_autocast(const at::Tensor& x) {
  return LooksAtAutocast::apply(x);
}

COHORT_REMOTE(apply_layer);
COHORT_REMOTE(apply_layer_twice);
COHORT_REMOTE(layer_gradient);
COHORT_REMOTE(narrowing);
COHORT_REMOTE(fails_at_once);
COHORT_REMOTE(gradients_are_on);
COHORT_REMOTE(looks_at_autocast);

class AgentCallerStateTest : public testing::Test {
 protected:
  AgentCallerStateTest() { narrow_layer = (at::linspace(-1, 1, 16).view({4, 4}) * 1.37).requires_grad_(); }
  ~AgentCallerStateTest() override { narrow_layer.reset(); }
  static AgentOptions one_thread() {
    AgentOptions options;
    options.num_threads = 1;
    return options;
  }
  Job job{3, one_thread()};  // the next handler runs on the thread of the last one
  const at::Tensor x = at::linspace(0.1, 0.93, 8).view({2, 4}).clone().requires_grad_();
};

TEST_F(AgentCallerStateTest, AutocastGoesWithACallAndNoFurther) {
  const auto expect_on = [&](bool is_on) {
    const Narrowing all = job[0].rpc_sync<narrowing>("w1", "w1");
    ASSERT_EQ(all.size(), 2U);
    for (const auto& [on, dtype] : all) {
      EXPECT_EQ(on, is_on);
      if (is_on) {
        EXPECT_EQ(dtype, at::kHalf);
      }
    }
  };
  expect_on(false);
  {
    const optim::Autocast autocast(at::kCPU, at::kHalf);
    expect_on(true);
    COHORT_EXPECT_THROW_WITH(job[0].rpc_sync<fails_at_once>("w1"), DataError, "it fails");
    const optim::Autocast off(at::kCPU, at::kHalf, false);
    expect_on(false);
  }
  expect_on(false);
  job.shutdown();
}

TEST_F(AgentCallerStateTest, ACallUnderAutocastHasTheBitsOfOneProcess) {
  const at::Tensor own_x = x.detach().clone().requires_grad_(),
                   own_layer = narrow_layer.detach().clone().requires_grad_();
  at::Tensor expected;
  at::autocast::set_autocast_cache_enabled(false);  // as in handlers: the layer is used twice
  {
    const optim::Autocast autocast(at::kCPU, at::kBFloat16);
    expected = at::linear(at::linear(own_x, own_layer).relu(), own_layer);
  }
  at::autocast::set_autocast_cache_enabled(true);
  expected.to(at::kFloat).square().sum().backward();
  Context context(job[0]);
  at::Tensor y;
  {
    const optim::Autocast autocast(at::kCPU, at::kBFloat16);
    y = job[0].rpc_sync<apply_layer_twice>("w1", x);
  }
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(y, expected));
  dist_autograd::backward(context, {y.to(at::kFloat).square().sum()});
  const auto gradients = dist_autograd::get_gradients(context);
  ASSERT_EQ(gradients.size(), 1U);
  EXPECT_TRUE(at::equal(gradients[0].second, own_x.grad()));
  EXPECT_TRUE(at::equal(job[0].rpc_sync<layer_gradient>("w1", context.id()).value(), own_layer.grad()));
}

TEST_F(AgentCallerStateTest, ABackwardElsewhereIsNotNarrowed) {
  const optim::Autocast autocast(at::kCPU, at::kBFloat16);
  num_narrow_backwards = 0;
  Context context(job[0]);
  dist_autograd::backward(context, {job[0].rpc_sync<looks_at_autocast>("w1", x).sum()});
  EXPECT_EQ(num_narrow_backwards.load(), 0);
}

TEST_F(AgentCallerStateTest, AHandlerHasNoGradientsWhereItsCallerHasNone) {
  for (const char* worker : {"w0", "w1"}) {
    EXPECT_TRUE(std::get<0>(job[0].rpc_sync<gradients_are_on>(worker, at::ones({2})))) << worker;
    {
      const at::NoGradGuard no_grad;
      EXPECT_FALSE(std::get<0>(job[0].rpc_sync<gradients_are_on>(worker, at::ones({2})))) << worker;
    }
    at::Tensor twice;
    {
      const c10::InferenceMode inference;
      const at::Tensor given = at::ones({2});
      ASSERT_TRUE(given.is_inference());
      bool has_gradients = true, is_inference = true;
      std::tie(has_gradients, is_inference, twice) = job[0].rpc_sync<gradients_are_on>(worker, given);
      EXPECT_FALSE(has_gradients) << worker;
      EXPECT_FALSE(is_inference) << worker;
    }
    const at::Tensor leaf = at::ones({2}).requires_grad_();
    (leaf * twice).sum().backward();
    EXPECT_TRUE(at::equal(leaf.grad(), twice)) << worker << ": it can be saved for a backward";
  }
}

test::Gate* narrow_gate = nullptr;
void wait_for_narrow_gate() {
  narrow_gate->wait();
}
COHORT_REMOTE(wait_for_narrow_gate);

// Whoever waits reads for others too.
TEST(AgentCallerStatesTest, AThreadThatWaitsDeliversWithoutItsOwnState) {
  AgentOptions options;
  options.spin = std::chrono::seconds(10);
  Job job(2, options);
  test::Gate gate;
  narrow_gate = &gate;
  std::atomic<bool> begins{false};
  std::atomic<int> num_ready{0}, num_wrong{0};
  std::thread waits([&] {
    const optim::Autocast autocast(at::kCPU, at::kHalf);
    const Context context(job[0], {.random = core::RandomKey{.seed = 1}});
    auto future = job[0].rpc_async<wait_for_narrow_gate>("w1");
    begins = true;
    future.get();
    EXPECT_TRUE(narrows_here());
    EXPECT_TRUE(SeedScope::next().has_value());
  });
  while (!begins) std::this_thread::yield();
  constexpr int kNumCalls = 60;
  for (int i = 0; i < kNumCalls; ++i) {
    job[0].rpc_async<narrowing>("w1", "w2").on_ready([&] {
      if (narrows_here() || SeedScope::next().has_value()) ++num_wrong;
      ++num_ready;
    });
  }
  EXPECT_TRUE(comes_true([&] { return num_ready == kNumCalls; }));
  EXPECT_EQ(num_wrong.load(), 0);
  gate.open();
  waits.join();
  job.shutdown();
}

}  // namespace
}  // namespace cohort::rpc

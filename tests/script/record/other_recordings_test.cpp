#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "cohort/base/placement.h"
#include "cohort/parallel/placement_worker.h"
#include "cohort/script/script.h"
#include "tests/script/like_eager.h"
#include "tests/support/contains.h"

// A recording, and what runs beside it: other threads, and graphs that were there before.
namespace cohort::script {
namespace {

using test::contains;
using test::same_bits;

TEST(OtherRecordingsTest, AFunctionThatUsesAPlacementLeavesRecordingsOfOtherThreadsAlone) {
  const auto worker = parallel::PlacementWorker::of(base::Placement::parse("cpu:1"));
  std::atomic<bool> stop{false};
  std::atomic<int> recorded_there{0};
  std::thread thread([&] {
    const at::NoGradGuard no_grad;
    while (!stop) {
      auto far = script([&](const at::Tensor& x) { return worker->run("x", [&] { return x + 1; }) * 2; });
      far(at::ones({2}));
      ++recorded_there;
    }
  });
  while (recorded_there == 0) std::this_thread::yield();
  const at::NoGradGuard no_grad;
  int rejected = 0;
  for (int i = 0; i < 50; ++i) {
    auto near = script([](const at::Tensor& x) {
      at::Tensor y = x;
      for (int k = 0; k < 50; ++k) y = y * 1.01;
      return y;
    });
    for (int call = 0; call < 3; ++call) near(at::full({64}, call));
    if (!contains(near.explain(), "program: ")) ++rejected;
  }
  stop = true;
  thread.join();
  EXPECT_EQ(rejected, 0);
}

TEST(OtherRecordingsTest, AFunctionThatUsesAPlacementItselfStaysEager) {
  const auto worker = parallel::PlacementWorker::of(base::Placement::parse("cpu:1"));
  const at::NoGradGuard no_grad;
  const auto fn = [&](const at::Tensor& x) { return worker->run("x", [&] { return x + 1; }) * 2; };
  auto fast = script(fn);
  for (int call = 0; call < 8; ++call) {
    const at::Tensor x = at::full({3}, call);
    EXPECT_TRUE(same_bits(fn(x), fast(x))) << call;
  }
  EXPECT_TRUE(contains(fast.explain(), "another thread")) << fast.explain();
}

// A captured tensor that has a graph: its gradient continues to what it was made of.
TEST(OtherRecordingsTest, ACapturedTensorWithAGraphOfItsOwnKeepsItsGradient) {
  const auto run = [](bool is_scripted) {
    at::Tensor w = at::full({3}, 2.0).requires_grad_(), scale = w * 2;
    const auto fn = [&](const at::Tensor& x) { return (x * scale).exp().sum() * 1; };
    auto fast = script(fn);
    Tensors seen;
    for (int call = 0; call < 10; ++call) {
      const at::Tensor x = at::full({3}, 0.1 * call).requires_grad_();
      const at::Tensor y = is_scripted ? fast(x) : fn(x);
      const auto gradients = torch::autograd::grad({y}, {x, w}, {}, /*retain_graph=*/true);
      seen.insert(seen.end(), {y, gradients[0], gradients[1]});
      if (call == 6) scale = w.view({3}) + 1;
    }
    return seen;
  };
  EXPECT_TRUE(same_bits(run(false), run(true)));
}

// Memory of the world that the function changes, and that has a graph then, or a member that it sets:
// gradients go back through it to the inputs of the calls before.
TEST(OtherRecordingsTest, WhatAFunctionLeavesBehindWithAGraphLeadsToTheInputsOfEarlierCalls) {
  enum class StateKind : std::uint8_t { kBuffer, kView, kMember };
  for (const StateKind kind : {StateKind::kBuffer, StateKind::kView, StateKind::kMember}) {
    for (const bool detaches : {false, true}) {
      const auto run = [=](bool is_scripted) {
        at::Tensor state = at::zeros({4}), w = at::full({2}, 2.0).requires_grad_();
        at::Tensor buffer = kind == StateKind::kView ? state.slice(0, 1, 3) : at::zeros({2});
        const auto fn = [&](const at::Tensor& x) {
          if (detaches) buffer = buffer.detach();
          if (kind == StateKind::kMember) {
            buffer = buffer * 0.5 + x * w;
          } else {
            buffer.mul_(0.5).add_(x * w);
          }
          return buffer.sin() * 2;
        };
        auto fast = script(fn);
        Tensors seen, inputs;
        for (int call = 0; call < 7; ++call) {
          const at::Tensor x = at::full({2}, 0.1 * call).requires_grad_();
          inputs.push_back(x);
          const at::Tensor y = is_scripted ? fast(x) : fn(x);
          torch::autograd::backward({y + buffer}, {at::ones({2})}, /*retain_graph=*/true);
          seen.insert(seen.end(), {y.detach(), buffer.detach().clone(), w.grad().clone()});
          for (const at::Tensor& input : inputs) seen.push_back(input.grad().clone());
        }
        return seen;
      };
      EXPECT_TRUE(same_bits(run(false), run(true))) << static_cast<int>(kind) << detaches;
    }
  }
}

// A view of a parameter that was taken without gradients says that it needs one, and has no history.
TEST(OtherRecordingsTest, ARejectedFunctionTakesAViewThatWasTakenWithoutGradients) {
  const at::Tensor w = at::ones({2, 3}).requires_grad_(), v = at::ones({3}).requires_grad_();
  at::Tensor row;
  {
    const at::NoGradGuard no_grad;
    row = w[0];
  }
  auto fast = script([&](const at::Tensor& x) { return x * v * x.sum().item<float>(); });
  for (int call = 0; call < 4; ++call) {
    v.mutable_grad().reset();
    fast(row).sum().backward();
    EXPECT_TRUE(at::equal(v.grad(), at::full({3}, 3.0)));
    EXPECT_FALSE(w.grad().defined());
  }
}

// A result, and another view of its memory that as_strided() does not make of it: who writes to one of them
// changes the gradient of the other.
TEST(OtherRecordingsTest, ResultsThatShareMemoryInAWayThatCannotBeMadeAnewAreLikeEagers) {
  const auto run = [](bool is_scripted, bool is_same) {
    const auto fn = [=](const at::Tensor& x) {
      const at::Tensor z = at::complex(x, x * 2).conj();
      const at::Tensor part = at::imag(z);
      return std::vector<at::Tensor>{part, is_same ? part : at::imag(z)};
    };
    auto fast = script(fn);
    Tensors seen;
    for (int call = 0; call < 6; ++call) {
      const at::Tensor x = at::full({3}, 0.5 + call).requires_grad_(), s = at::full({}, 3.0).requires_grad_();
      std::vector<at::Tensor> y = is_scripted ? fast(x) : fn(x);
      y[0].mul_(s);
      y[1].square().sum().backward();
      seen.insert(seen.end(), {y[1].detach().resolve_neg(), x.grad(), s.grad()});
    }
    return seen;
  };
  for (const bool is_same : {false, true}) {
    EXPECT_TRUE(same_bits(run(false, is_same), run(true, is_same))) << is_same;
  }
}

}  // namespace
}  // namespace cohort::script

#include "cohort/script/fork.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>

#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <semaphore>
#include <set>
#include <thread>

#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/core/random_scope.h"
#include "cohort/optim/autocast.h"
#include "cohort/script/file.h"
#include "cohort/script/script.h"
#include "cohort/script/step.h"
#include "nets.h"
#include "tests/support/gate.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::script {
namespace {

using namespace std::chrono_literals;
using test::same_bits;

at::Tensor chain(at::Tensor x, const at::Tensor& weights) {
  for (int i = 0; i < 4; ++i) x = x.matmul(weights).tanh();
  return x;
}

TEST(ForkTest, ReturnsWhatThePlainCallReturnsWhileTheCallerContinues) {
  const at::Tensor x = at::rand({8, 8}), weights = at::rand({8, 8});
  std::thread::id ran_on;
  auto first = fork(
      [&](const at::Tensor& t) {
        ran_on = std::this_thread::get_id();
        return std::pair(chain(t, weights), std::vector<at::Tensor>{t + 1});
      },
      x);
  auto second = fork([&](const at::Tensor& t, const at::Tensor& w) { return chain(t, w); }, x, weights);
  const auto [y, more] = wait(first);
  EXPECT_TRUE(same_bits(y, chain(x, weights)));
  EXPECT_TRUE(same_bits(more.at(0), x + 1));
  EXPECT_TRUE(same_bits(wait(second), y));
  EXPECT_NE(ran_on, std::this_thread::get_id());
  COHORT_EXPECT_THROW_WITH(wait(second), UsageError, "taken before");
}

TEST(ForkTest, GradientsReachInputsAndParametersAsInOneGraph) {
  at::manual_seed(1);
  auto left = test::small_mlp(), right = test::small_mlp();
  left->eval();
  right->eval();
  const at::Tensor base = at::randn({16, 32}).requires_grad_();
  std::vector<std::vector<at::Tensor>> found;
  for (const bool forked : {false, true}) {
    const at::Tensor x = base * 2;
    at::Tensor y;
    if (forked) {
      auto a = fork(left, x), b = fork(right, x);
      y = wait(a) * wait(b);
    } else {
      y = left->forward(x) * right->forward(x);
    }
    y.square().mean().backward();
    auto& all = found.emplace_back(std::vector<at::Tensor>{y.detach(), base.grad().clone()});
    for (auto model : {left, right}) {
      for (const at::Tensor& parameter : model->parameters()) all.push_back(parameter.grad().clone());
      model->zero_grad();
    }
    base.mutable_grad().reset();
  }
  EXPECT_TRUE(same_bits(found[0], found[1]));
}

TEST(ForkTest, AGraphOfItsOwnMustBeAnInputAndSecondDerivativesAreRejected) {
  const at::Tensor leaf = at::rand({3}).requires_grad_();
  const at::Tensor inner = leaf * 2;
  auto captured = fork([&](const at::Tensor& t) { return t * inner; }, leaf);
  COHORT_EXPECT_THROW_WITH(wait(captured), UsageError, "hand it over as an input");
  const at::Tensor y = wait(fork([](const at::Tensor& t) { return t.square(); }, inner));
  COHORT_EXPECT_THROW_WITH(torch::autograd::grad({y.sum()}, {leaf}, {}, true, true), UsageError,
                           "goes through a forked part");
}

TEST(ForkTest, APartMayChangeItsInputInPlace) {
  const auto body = [](const at::Tensor& h) { return h.relu_().exp(); };
  const at::Tensor x = at::randn({3, 4}).requires_grad_();
  const auto gradient = [&](auto&& run) {
    const at::Tensor h = x * 2, y = run(h);
    return torch::autograd::grad({y.sum() + (h * h).sum()}, {x})[0];
  };
  const at::Tensor expected = gradient(body);
  EXPECT_TRUE(same_bits(gradient([&](const at::Tensor& h) { return wait(fork(body, h)); }), expected));
}

TEST(ForkTest, TakesTheModesOfTheCaller) {
  const auto see = [](const at::Tensor& t) { return std::pair(t.matmul(t), at::GradMode::is_enabled()); };
  const at::Tensor x = at::rand({4, 4}).requires_grad_();
  EXPECT_TRUE(wait(fork(see, x)).first.requires_grad());
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(wait(fork(see, x)).second);
    EXPECT_FALSE(wait(fork(see, x)).first.requires_grad());
  }
  const auto caches = [](const at::Tensor& t) {
    return std::pair(t * 2, at::autocast::is_autocast_cache_enabled());
  };
  {
    const optim::Autocast uncached(at::kCPU, at::kBFloat16, true, /*cache_enabled=*/false);
    EXPECT_FALSE(wait(fork(caches, x)).second);
  }
  EXPECT_TRUE(wait(fork(caches, x)).second);
  const c10::InferenceMode inference;
  const optim::Autocast autocast(at::kCPU, at::kBFloat16);
  const at::Tensor y = wait(fork(see, x)).first;
  EXPECT_TRUE(y.is_inference());
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
}

TEST(ForkTest, WhatThePartThrowsComesOutOfWait) {
  const at::Tensor x = at::rand({3});
  auto ours = fork(
      [](const at::Tensor& t) -> at::Tensor {
        throw DataError("test", "no such thing");
        return t;
      },
      x);
  auto torchs = fork([](const at::Tensor& t) { return t.matmul(at::rand({4, 4})); }, x);
  COHORT_EXPECT_THROW_WITH(wait(ours), DataError, "no such thing");
  EXPECT_THROW(wait(torchs), c10::Error);
  EXPECT_TRUE(same_bits(wait(fork([](const at::Tensor& t) { return t + 1; }, x)), x + 1));
}

TEST(ForkTest, RandomOperatorsNeedAScopeOfTheirOwn) {
  const at::Tensor x = at::ones({100});
  auto plain = fork([](const at::Tensor& t) { return at::dropout(t, 0.5, true); }, x);
  COHORT_EXPECT_THROW_WITH(wait(plain), UsageError, "where threads would decide their order");
  const auto drop = [](const at::Tensor& t) {
    const core::RandomScope scope({.seed = 5, .part = 1});
    return at::dropout(t, 0.5, true);
  };
  EXPECT_TRUE(same_bits(wait(fork(drop, x)), drop(x)));
  at::manual_seed(3);
  const at::Tensor next = at::rand({2});
  at::manual_seed(3);
  wait(fork(drop, x));
  EXPECT_TRUE(same_bits(at::rand({2}), next));
}

at::Tensor sum_of_tree(const at::Tensor& x, int depth) {
  if (depth == 0) return x * 1.5;
  auto left = fork([=](const at::Tensor& t) { return sum_of_tree(t + depth, depth - 1); }, x);
  auto right = fork([=](const at::Tensor& t) { return sum_of_tree(t - depth, depth - 1); }, x);
  return wait(left) + wait(right);
}

TEST(ForkTest, NestedPartsFindAThreadAndKeepTheirGradients) {
  const at::Tensor x = at::arange(4, at::kFloat).requires_grad_();  // whose sums are exact
  const at::Tensor y =
      wait(fork([](const at::Tensor& t) { return sum_of_tree(t, 5); }, x), base::Deadline(60s));
  EXPECT_TRUE(same_bits(y, x * 48));
  y.sum().backward();
  EXPECT_TRUE(same_bits(x.grad(), at::full({4}, 48.0F)));
}

std::size_t num_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

TEST(ForkTest, AThousandPartsTakeNoMoreThreadsThanThereAreCores) {
  const at::Tensor x = at::rand({4});
  wait(fork([](const at::Tensor& t) { return t + 1; }, x));
  const std::size_t before = num_threads();
  std::vector<Future<at::Tensor>> open;
  for (int i = 0; i < 1000; ++i) open.push_back(fork([=](const at::Tensor& t) { return t + i; }, x));
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(same_bits(wait(open[static_cast<std::size_t>(i)]), x + i));
  }
  EXPECT_LT(num_threads(), before + static_cast<std::size_t>(base::usable_cores()));
}

TEST(ForkTest, ADeadlineThatPassesIsAnErrorAndOthersContinue) {
  const at::Tensor x = at::rand({4});
  test::Gate go;
  std::counting_semaphore<> began(0);
  std::vector<Future<at::Tensor>> stuck;
  for (int i = 0; i < base::usable_cores(); ++i) {
    stuck.push_back(fork(
        [&](const at::Tensor& t) {
          began.release();
          go.wait();
          return t * 2;
        },
        x));
  }
  for (std::size_t i = 0; i < stuck.size(); ++i) ASSERT_TRUE(began.try_acquire_for(30s));
  for (auto& each : stuck) {
    COHORT_EXPECT_THROW_WITH(wait(each, base::Deadline(50ms)), TimeoutError, "which is running");
  }
  EXPECT_TRUE(
      same_bits(wait(fork([](const at::Tensor& t) { return t + 1; }, x), base::Deadline(30s)), x + 1));
  go.open();
  for (auto& each : stuck) EXPECT_TRUE(same_bits(wait(each, base::Deadline(30s)), x * 2));
}

TEST(ForkTest, APartThatNobodyWaitsForIsEndedBeforeItsFutureIs) {
  const at::Tensor x = at::rand({4});
  std::counting_semaphore<> began(0);
  std::atomic<bool> ended{false};
  {
    auto part = fork(
        [&](const at::Tensor& t) {
          began.release();
          std::this_thread::sleep_for(50ms);
          ended = true;
          return t;
        },
        x);
    ASSERT_TRUE(began.try_acquire_for(30s));
  }
  EXPECT_TRUE(ended);
}

TEST(ForkTest, AScriptedFunctionRecordsItsPartsWithTheirGradients) {
  auto left = test::small_mlp(), right = test::small_mlp();
  left->eval();
  right->eval();
  const auto both = [=](const at::Tensor& x) mutable {
    auto a = fork(left, x), b = fork(right, x);
    return wait(a) * wait(b) + x.sum();
  };
  auto fast = script(both);
  auto plain = both;
  for (int i = 0; i < 5; ++i) {
    const at::Tensor base = at::randn({16, 32}), x = base.clone().requires_grad_(),
                     z = base.clone().requires_grad_();
    std::vector<std::vector<at::Tensor>> found(2);
    for (const bool scripted : {false, true}) {
      const at::Tensor input = scripted ? x : z;
      const at::Tensor y = scripted ? fast(input) : plain(input);
      y.square().mean().backward();
      auto& all = found[scripted ? 1 : 0];
      all = {y.detach(), input.grad()};
      for (auto model : {left, right}) {
        for (const at::Tensor& parameter : model->parameters()) all.push_back(parameter.grad().clone());
        model->zero_grad();
      }
    }
    EXPECT_TRUE(same_bits(found[0], found[1])) << i;
  }
  EXPECT_NE(fast.explain().find("values saved for backward"), std::string::npos) << fast.explain();
}

// Of an operator that can wait for another call of itself, and fail.
struct ForkBarrier {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_on = false, fails = false, has_timed_out = false;
  int present = 0;
  std::set<std::thread::id> threads;

  static ForkBarrier& get() {
    static ForkBarrier barrier;
    return barrier;
  }
  void begin() {
    const std::lock_guard lock(mutex);
    is_on = true;
    has_timed_out = false;
    present = 0;
    threads.clear();
  }
  // True if two calls were there at the same time.
  bool was_passed() {
    const std::lock_guard lock(mutex);
    is_on = false;
    return present == 2 && threads.size() == 2 && !has_timed_out;
  }
};

at::Tensor wait_for_call(const at::Tensor& x) {
  ForkBarrier& barrier = ForkBarrier::get();
  std::unique_lock lock(barrier.mutex);
  if (barrier.fails) throw std::runtime_error("the operator fails");
  if (barrier.is_on) {
    ++barrier.present;
    barrier.threads.insert(std::this_thread::get_id());
    barrier.changed.notify_all();
    barrier.has_timed_out |= !barrier.changed.wait_for(lock, 20s, [&] { return barrier.present == 2; });
  }
  return x * 2;
}

TORCH_LIBRARY(script_fork_test, library) {
  library.def("wait_for_call(Tensor x) -> Tensor");
  library.impl("wait_for_call", c10::DispatchKey::CPU, &wait_for_call);
}

at::Tensor call_waiting(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("script_fork_test::wait_for_call", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

at::Tensor call_two(const at::Tensor& x, const at::Tensor& y) {
  auto part = fork([](const at::Tensor& t) { return call_waiting(t).sin(); }, x);
  const at::Tensor of_caller = call_waiting(y).cos();
  return wait(part) + of_caller;
}

TEST(ForkTest, AReplayRunsAPartBesideWhatFollowsIt) {
  const at::NoGradGuard no_grad;
  auto fast = script(call_two, ScriptOptions().verify(false));
  for (int i = 0; i < 6; ++i) {
    const at::Tensor x = at::rand({8, 8}), y = at::rand({8, 8});
    const at::Tensor expected = (x * 2).sin() + (y * 2).cos();
    if (i >= 2) ForkBarrier::get().begin();  // two recordings, a warm-up, replays
    const bool is_warmed_up = i == 2;
    if (is_warmed_up) ForkBarrier::get().was_passed();
    EXPECT_TRUE(same_bits(fast(x, y), expected)) << i;
    if (i > 2) {
      EXPECT_TRUE(ForkBarrier::get().was_passed()) << i;
    }
  }
  EXPECT_NE(fast.explain().find("1 forked parts on other threads"), std::string::npos) << fast.explain();
}

TEST(ForkTest, AProgramFromAFileRunsAPartBesideWhatFollowsIt) {
  const at::NoGradGuard no_grad;
  auto fast = script(call_two);
  const at::Tensor x = at::rand({8, 8}), y = at::rand({8, 8});
  for (int i = 0; i < 3; ++i) fast(x, y);
  const test::TempDir folder;
  fast.save((folder.path() / "two.safetensors").string());
  auto loaded = load((folder.path() / "two.safetensors").string());
  const at::Tensor expected = fast(x, y);
  EXPECT_TRUE(same_bits(loaded({x, y}).at(0), expected));
  ForkBarrier::get().begin();
  EXPECT_TRUE(same_bits(loaded({x, y}).at(0), expected));
  EXPECT_TRUE(ForkBarrier::get().was_passed());
}

TEST(ForkTest, WhatAReplayedPartThrowsIsThrownAndTheNextCallRuns) {
  const at::NoGradGuard no_grad;
  auto fast = script([](const at::Tensor& x, const at::Tensor& y) {
    auto part = fork([](const at::Tensor& t) { return call_waiting(t.exp()); }, x);
    const at::Tensor of_caller = y.sin().matmul(y);
    return wait(part) + of_caller;
  });
  const at::Tensor x = at::rand({8, 8}), y = at::rand({8, 8});
  const at::Tensor expected = fast(x, y);
  for (int i = 0; i < 6; ++i) {
    EXPECT_TRUE(same_bits(fast(x, y), expected)) << i;
    if (i < 3) continue;
    ForkBarrier::get().fails = true;
    COHORT_EXPECT_THROW_WITH(fast(x, y), std::runtime_error, "the operator fails");
    ForkBarrier::get().fails = false;
  }
}

// Parts that need each other's results, write where the caller reads and the other way around: whatever the
// threads do, a replay keeps the order of the recording where it matters.
at::Tensor tangle(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  const at::Tensor shared = x * 2, kept = x.sin();
  auto reads = fork([&](const at::Tensor& t) { return chain(t, weights[0]); }, shared);
  at::Tensor value = chain(x, weights[1]);
  shared.add_(value);  // after the part's reading
  auto writes = fork(
      [&](const at::Tensor& t) {
        const at::Tensor y = chain(t, weights[2]);
        kept.mul_(y);
        return y;
      },
      value);
  value = value + chain(shared, weights[3]) + kept;  // after the part's writing
  auto nested = fork(
      [&](const at::Tensor& t) {
        auto inner = fork([&](const at::Tensor& u) { return chain(u, weights[0]); }, t);
        return wait(inner) + chain(t, weights[1]);
      },
      value);
  const at::Tensor last = chain(value.exp(), weights[2]);
  return wait(nested) + last + wait(reads) + wait(writes) + shared.view({-1}).narrow(0, 0, 1);
}

// The same, with everything in order.
at::Tensor in_order(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  at::Tensor shared = x * 2, kept = x.sin();
  const at::Tensor reads = chain(shared, weights[0]);
  at::Tensor value = chain(x, weights[1]);
  shared = shared + value;
  const at::Tensor writes = chain(value, weights[2]);
  kept = kept * writes;
  value = value + chain(shared, weights[3]) + kept;
  const at::Tensor nested = chain(value, weights[0]) + chain(value, weights[1]);
  const at::Tensor last = chain(value.exp(), weights[2]);
  return nested + last + reads + writes + shared.view({-1}).narrow(0, 0, 1);
}

TEST(ForkTest, ReplayedPartsKeepTheOrderOfWhatTheyTouch) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 4; ++i) weights.push_back(at::randn({64, 64}) / 8);
  auto fast = script([&](const at::Tensor& x) { return tangle(x, weights); });
  const auto check = [&](int calls) {
    for (int i = 0; i < calls; ++i) {
      const at::Tensor x = at::randn({64, 64});
      ASSERT_TRUE(same_bits(fast(x), in_order(x, weights))) << i;
    }
  };
  check(3);
  std::thread other(check, 100);
  check(100);
  other.join();
  EXPECT_NE(fast.explain().find("3 forked parts"), std::string::npos) << fast.explain();
}

struct TwoTowersImpl : torch::nn::Module {
  explicit TwoTowersImpl(bool side_by_side)
      : forked(side_by_side),
        left(register_module("left", test::small_mlp())),
        right(register_module("right", test::small_mlp())) {}
  at::Tensor forward(const at::Tensor& x) {
    if (!forked) return left->forward(x) * right->forward(x);
    auto a = fork(left, x), b = fork(right, x);
    return wait(a) * wait(b);
  }
  bool forked;
  test::nn::Sequential left, right;
};
TORCH_MODULE(TwoTowers);

TEST(ForkTest, AScriptedStepTrainsWithPartsAsWithoutThem) {
  std::vector<std::vector<at::Tensor>> trained;
  for (const bool forked : {false, true}) {
    at::manual_seed(5);
    TwoTowers model(forked);
    model->eval();
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    auto step = script_step(
        model, [](const at::Tensor& y, const at::Tensor& t) { return (y - t).square().mean(); }, optimizer);
    for (int i = 0; i < 20; ++i) step(at::randn({16, 32}), at::randn({16, 10}));
    trained.push_back(model->parameters());
    EXPECT_EQ(step.explain().find("2 forked parts") != std::string::npos, forked) << step.explain();
  }
  EXPECT_TRUE(same_bits(trained[0], trained[1]));
}

}  // namespace
}  // namespace cohort::script

#include "cohort/autograd/detached_graph.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <atomic>
#include <future>
#include <mutex>
#include <random>
#include <thread>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::autograd {
namespace {

using Tensors = std::vector<at::Tensor>;
using std::chrono::seconds;

at::Tensor leaf(std::int64_t rows, std::int64_t columns) {
  return at::arange(rows * columns, at::kFloat).view({rows, columns}).sin().requires_grad_();
}

// Backward of a tensor in which something happens first.
struct Pause : torch::autograd::Function<Pause> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::function<void()>* then) {
    context->saved_data["then"] = reinterpret_cast<std::int64_t>(then);
    return x.clone();
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["then"].toInt()))();
    return {gradients[0], at::Tensor()};
  }
};

class CountingHook : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit CountingHook(std::atomic<int>& runs) : runs_(runs) {}
  void operator()(const torch::autograd::Variable& /*leaf*/) override { ++runs_; }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}
  void apply_with_saved(torch::autograd::Variable& /*leaf*/,
                        torch::dynamo::autograd::SwapSavedVariables& /*saved*/) override {}

 private:
  std::atomic<int>& runs_;
};

// Two layers that threads share. A hook on each of its parameters doubles the gradient and counts.
struct SharedNet {
  SharedNet() {
    for (const at::Tensor& parameter : parameters) {
      parameter.register_hook([this](const at::Tensor& gradient) {
        ++hooks;
        return gradient * 2;
      });
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<CountingHook>(post_hooks));
    }
  }
  Tensors operator()(const at::Tensor& x) const {
    const at::Tensor h = at::tanh(at::linear(x, parameters[0]));
    return {at::linear(h, parameters[1]), h * 2};
  }
  Tensors parameters{leaf(5, 4), leaf(3, 5)};
  std::atomic<int> hooks{0}, post_hooks{0};
};

std::unique_ptr<DetachedGraph> part_of(const SharedNet& net, const at::Tensor& x, Tensors& results) {
  auto part = std::make_unique<DetachedGraph>(Tensors{x});
  results = part->end(net(part->leaves().front()));
  return part;
}

bool are_equal(const Tensors& a, const Tensors& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return true;
}

at::Tensor loss_of(const Tensors& results) {
  at::Tensor sum = at::zeros({});
  for (const at::Tensor& result : results) sum = sum + result.sum();
  return sum;
}

TEST(DetachedGraphTest, HooksOfWhatItCapturedDoNotRunInIt) {
  SharedNet net;
  const at::Tensor x = leaf(2, 4);
  Tensors results;
  const auto part = part_of(net, x, results);
  const Tensors found = part->backward({at::ones({2, 3}), at::ones({2, 5})}, false);
  ASSERT_EQ(part->captured().size(), 2U);
  EXPECT_EQ(net.hooks, 0);
  loss_of(net(x)).backward();
  EXPECT_EQ(net.hooks, 2);
  EXPECT_EQ(net.post_hooks, 2);
  EXPECT_TRUE(at::equal(found[0], x.grad()));
  for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(found[1 + i] * 2, part->captured()[i].grad()));
}

// A late part holds the leaf's gradient up while another part begins and ends, and the caller's own backward
// needs the hooks.
TEST(DetachedGraphTest, ALatePartKeepsNoHookFromAnotherThread) {
  SharedNet net;
  const at::Tensor x = leaf(2, 4);
  std::promise<void> is_within, may_continue;
  std::function<void()> wait = [&] {
    is_within.set_value();
    may_continue.get_future().wait_for(seconds(60));
  };
  DetachedGraph late({x});
  const Tensors late_results = late.end({Pause::apply(net(late.leaves()[0])[0], &wait)});
  auto found = std::async(std::launch::async, [&] { return late.backward({at::ones({2, 3})}, false); });
  ASSERT_EQ(is_within.get_future().wait_for(seconds(60)), std::future_status::ready);

  Tensors results;
  const auto quick = part_of(net, x, results);
  quick->backward({at::ones({2, 3}), at::ones({2, 5})}, false);
  EXPECT_EQ(net.hooks, 0);
  loss_of(net(x)).backward();
  EXPECT_EQ(net.hooks, 2);
  EXPECT_EQ(net.post_hooks, 2);

  may_continue.set_value();
  ASSERT_EQ(found.wait_for(seconds(60)), std::future_status::ready);
  found.get();
  EXPECT_EQ(net.hooks, 2);
  loss_of(net(x)).backward();
  EXPECT_EQ(net.hooks, 4);
}

// Threads run parts and whole backwards of one net in an order of chance. Parts change hands, and some fail.
TEST(DetachedGraphTest, ThreadsThatShareParametersRunEachHookAsOftenAsTheyShould) {
  constexpr int kThreads = 4, kRounds = 150;
  const auto seed = std::random_device{}();
  SCOPED_TRACE(base::concat("seed ", seed));
  SharedNet net;
  const at::Tensor x = leaf(2, 4);
  const Tensors flowing{at::ones({2, 3}), at::ones({2, 5})};
  Tensors results;
  const auto first = part_of(net, x, results);
  const Tensors expected = first->backward(flowing, false);
  Tensors leaves = first->captured();
  leaves.insert(leaves.begin(), x);
  std::atomic<int> whole{0}, accumulated{0}, wrong{0};
  std::mutex mutex;
  std::vector<std::unique_ptr<DetachedGraph>> begun;  // under mutex
  const auto act = [&](std::mt19937& random) {
    switch (random() % 6) {
      case 0:  // goes back here
      case 1: {
        Tensors of_part;
        wrong += !are_equal(part_of(net, x, of_part)->backward(flowing, false), expected);
        return;
      }
      case 2: {  // goes back on a thread of chance
        Tensors of_part;
        auto part = part_of(net, x, of_part);
        const std::lock_guard lock(mutex);
        begun.push_back(std::move(part));
        return;
      }
      case 3: {
        std::unique_ptr<DetachedGraph> part;
        {
          const std::lock_guard lock(mutex);
          if (begun.empty()) return;
          std::swap(begun[random() % begun.size()], begun.back());
          part = std::move(begun.back());
          begun.pop_back();
        }
        wrong += !are_equal(part->backward(flowing, false), expected);
        return;
      }
      case 4: {  // fails
        std::function<void()> fail = [] { throw std::runtime_error("meant to"); };
        DetachedGraph part({x});
        part.end({net(Pause::apply(part.leaves()[0], &fail))[0]});
        bool has_failed = false;
        try {
          part.backward({flowing[0]}, false);
        } catch (const std::runtime_error&) {
          has_failed = true;
        }
        wrong += !has_failed;
        return;
      }
      default: {  // the whole graph, hooks included
        ++whole;
        if (random() % 2 == 0) {
          ++accumulated;
          loss_of(net(x.detach())).backward();
          return;
        }
        Tensors of_leaves = torch::autograd::grad({loss_of(net(x))}, leaves);
        for (std::size_t i = 1; i < 3; ++i) of_leaves[i] = of_leaves[i] / 2;
        wrong += !are_equal(of_leaves, expected);
      }
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(seed + static_cast<unsigned>(t));
      for (int round = 0; round < kRounds; ++round) act(random);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(whole, 0);
  EXPECT_EQ(net.hooks, 2 * whole);
  EXPECT_EQ(net.post_hooks, 2 * accumulated);
}

// Functions of an input and of what they capture: a leaf, and a tensor that has a graph.
using Fn = std::function<at::Tensor(at::Tensor x, const at::Tensor& w)>;
const std::vector<Fn> kFunctions = {
    [](const at::Tensor& x, const at::Tensor& w) { return (x * w).sum() + w.square().sum(); },
    [](const at::Tensor& /*x*/, const at::Tensor& w) { return w; },
    [](const at::Tensor& x, const at::Tensor& w) {  // a part of a tensor is written to
      const at::Tensor h = x * 2;
      h.select(0, 0).mul_(w.select(0, 1));
      h.narrow(1, 0, 2).add_(w.narrow(1, 1, 2)).select(0, 0).mul_(w.narrow(1, 0, 2).select(0, 0));
      return h.square();
    },
    [](const at::Tensor& x, const at::Tensor& w) {
      const at::Tensor h = x * 2;
      h.select(0, 0).copy_(w.select(0, 1));
      return h * x;
    },
    [](const at::Tensor& x, const at::Tensor& w) {  // a part within a part
      DetachedGraph inner({x});
      return (x + w.exp()) * w.unbind()[0];
    },
    [](const at::Tensor& x, const at::Tensor& w) { return at::stack({x, w, w.detach(), w * x}); },
};

TEST(DetachedGraphTest, GradientsOfWhatItCapturedAreThoseOfAWholeGraph) {
  for (std::size_t i = 0; i < kFunctions.size(); ++i) {
    SCOPED_TRACE(i);
    const at::Tensor x = leaf(2, 4), w = (leaf(2, 4).detach() + 1).requires_grad_();
    const at::Tensor whole = kFunctions[i](x, w);
    const Tensors expected = torch::autograd::grad({whole}, {x, w}, {at::ones_like(whole)}, {}, false, true);
    DetachedGraph part({x});
    const at::Tensor result = kFunctions[i](part.leaves()[0], w);
    EXPECT_EQ(part.outside({result}), "");
    part.end({result});
    ASSERT_EQ(part.captured().size(), 1U);
    EXPECT_TRUE(part.captured()[0].is_same(w));
    const Tensors found = part.backward({at::ones_like(result)}, false);
    ASSERT_EQ(found[0].defined(), expected[0].defined());
    EXPECT_TRUE(!found[0].defined() || at::equal(found[0], expected[0]));
    EXPECT_TRUE(at::equal(found[1], expected[1]));
  }
}

TEST(DetachedGraphTest, WithoutEndItsResultsHaveTheWholeGraph) {
  for (std::size_t i = 0; i < kFunctions.size(); ++i) {
    SCOPED_TRACE(i);
    const at::Tensor x = leaf(2, 4), w = leaf(2, 4), v = leaf(2, 4);
    const at::Tensor input = x * 3, captured = w * v + 1;
    const at::Tensor whole = kFunctions[i](input, captured) * v.sum();
    const Tensors expected =
        torch::autograd::grad({whole}, {x, w, v}, {at::ones_like(whole)}, /*retain_graph=*/true, false, true);
    auto part = std::make_unique<DetachedGraph>(Tensors{input}, DetachedGraph::Words(),
                                                DetachedGraph::ForeignBackward::kContinues);
    const Tensors joined{kFunctions[i](non_leaf_proxies(part->leaves())[0], captured) * v.sum()};
    EXPECT_NE(part->outside(joined), "");
    part.reset();
    const auto of_input = [&](const at::Tensor& result) {
      return torch::autograd::grad({result}, {input}, {at::ones_like(whole)}, true, false, true).front();
    };
    const at::Tensor through = of_input(joined[0]), plain = of_input(whole);
    EXPECT_TRUE(through.defined() ? at::equal(through, plain) : !plain.defined());
    for (const bool keep_graph : {true, false}) {
      const Tensors found =
          torch::autograd::grad(joined, {x, w, v}, {at::ones_like(whole)}, keep_graph, false, true);
      for (std::size_t k = 0; k < 3; ++k) {
        ASSERT_EQ(found[k].defined(), expected[k].defined());
        EXPECT_TRUE(!found[k].defined() || at::equal(found[k], expected[k])) << found[k] << expected[k];
      }
    }
  }
}

TEST(DetachedGraphTest, AGraphOfItsOwnIsRejectedAndLeftAsItIs) {
  const at::Tensor x = leaf(2, 4), w = leaf(2, 4);
  const at::Tensor captured = w.exp();
  DetachedGraph part({x});
  const at::Tensor result = part.leaves()[0] * captured + w;
  EXPECT_EQ(part.outside({result}), "ExpBackward0");
  COHORT_EXPECT_THROW_WITH(part.end({result}), UsageError, "graph of its own (ExpBackward0)");
  const at::Tensor gradient = torch::autograd::grad({result.sum()}, {w}).front();
  EXPECT_TRUE(at::allclose(gradient, x.detach() * captured.detach() + 1));
}

TEST(DetachedGraphTest, WithoutEndSecondDerivativesAndOperatorsOfOtherThreadsGoThrough) {
  const at::Tensor x = leaf(2, 4);
  const auto second = [&](const at::Tensor& result) {
    const at::Tensor first = torch::autograd::grad({result.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.sum()}, {x})[0];
  };
  DetachedGraph part({x}, DetachedGraph::Words(), DetachedGraph::ForeignBackward::kContinues);
  at::Tensor result;
  std::thread([&] { result = part.leaves()[0].exp(); }).join();
  EXPECT_EQ(part.outside({result}), "ExpBackward0");
  EXPECT_TRUE(at::equal(second(result * part.leaves()[0]), second(x.exp() * x)));
}

// fn puts a tensor aside, and somebody goes back from there: leaf and hooks see that as ever.
TEST(DetachedGraphTest, ABackwardFromWhatFnPutAsideReachesTheLeaf) {
  SharedNet net;
  const at::Tensor x = leaf(2, 4);
  DetachedGraph part({x}, DetachedGraph::Words(), DetachedGraph::ForeignBackward::kContinues);
  const Tensors inner = net(part.leaves()[0]);
  part.end({inner[0] * 2});
  loss_of(inner).backward();
  EXPECT_EQ(net.hooks, 2);
  EXPECT_EQ(net.post_hooks, 2);
}

// Autocast keeps casts of parameters for the rest of its scope, for parts and for what is outside of them.
TEST(DetachedGraphTest, PartsAndTheirCallerShareWhatAutocastKeeps) {
  const at::Tensor x = leaf(2, 4);
  SharedNet net;
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::increment_nesting();
  Tensors results[2], of_whole = net(x);
  const Tensors flowing{at::ones({2, 3}, at::kBFloat16), at::ones({2, 5}, of_whole[1].scalar_type())};
  std::unique_ptr<DetachedGraph> parts[2] = {part_of(net, x, results[0]), part_of(net, x, results[1])};
  Tensors again = net(x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::decrement_nesting();
  at::autocast::clear_cache();
  Tensors leaves = parts[0]->captured();
  leaves.insert(leaves.begin(), x);
  const Tensors first = parts[0]->backward(flowing, false), second = parts[1]->backward(flowing, false);
  EXPECT_EQ(net.hooks, 0);
  for (const Tensors& whole : {of_whole, again}) {
    // Kept for both: the casts save nothing, so that going back through one graph leaves the other.
    const Tensors expected = torch::autograd::grad(whole, leaves, flowing);
    for (const Tensors* found : {&first, &second}) {
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ((*found)[i].scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal((*found)[i] * (i == 0 ? 1 : 2), expected[i]));
      }
    }
  }
  EXPECT_EQ(net.hooks, 4);
}

// What fn put aside has a graph that leads through the part to the caller's.
struct PutAside {
  explicit PutAside(DetachedGraph::ForeignBackward foreign_backward)
      : part({x}, DetachedGraph::Words(), foreign_backward) {
    const at::Tensor in = part.leaves()[0];
    in.register_hook([this](const at::Tensor& gradient) {
      ++hooks;
      return gradient * 3;
    });
    aside = in * w;
    results = part.end({(in * 2).exp()});
  }
  at::Tensor leaf = autograd::leaf(2, 3), w = autograd::leaf(2, 3), x = leaf.sin(), aside;
  std::atomic<int> hooks{0};
  DetachedGraph part;
  Tensors results;
};

TEST(DetachedGraphTest, ATensorThatFnPutAsideLeadsOnToTheGraphOfTheInputs) {
  PutAside made(DetachedGraph::ForeignBackward::kContinues);
  const at::Tensor gradient = at::full({2, 3}, 0.5);
  const Tensors of_part = made.part.backward({gradient}, /*keep_graph=*/true);
  EXPECT_TRUE(at::equal(of_part[0], gradient * (made.x * 2).exp() * 2 * 3));
  EXPECT_EQ(made.hooks, 1);
  EXPECT_FALSE(made.leaf.grad().defined());
  torch::autograd::backward({made.aside}, {gradient});
  EXPECT_TRUE(at::equal(made.leaf.grad(), gradient * made.w * 3 * made.leaf.cos()));
  EXPECT_TRUE(at::equal(made.w.grad(), gradient * made.x));
  EXPECT_EQ(made.hooks, 2);
}

TEST(DetachedGraphTest, ABackwardFromATensorThatFnPutAsideThrowsWhereTheCutIsForGood) {
  PutAside made(DetachedGraph::ForeignBackward::kThrows);
  const at::Tensor gradient = at::full({2, 3}, 0.5);
  COHORT_EXPECT_THROW_WITH(torch::autograd::backward({made.aside}, {gradient}), UsageError,
                           "put aside reaches an input");
  const Tensors of_part = made.part.backward({gradient}, /*keep_graph=*/false);
  EXPECT_TRUE(at::equal(of_part[0], gradient * (made.x * 2).exp() * 2 * 3));
}

TEST(PairwiseSumTest, TakesSparseAndDenseValuesInEitherOrder) {
  const at::Tensor dense = at::arange(6, at::kFloat).view({3, 2}).sin(),
                   sparse = (at::eye(3, 2) / 3).to_sparse();
  const at::Tensor expected = dense + sparse.to_dense(), before = dense.clone();
  EXPECT_TRUE(at::equal(pairwise_sum({dense, sparse}), expected));
  EXPECT_TRUE(at::equal(pairwise_sum({sparse, dense}), expected));
  EXPECT_TRUE(at::equal(dense, before)) << "a value that the caller holds stays";
  EXPECT_TRUE(at::equal(pairwise_sum({sparse, sparse, dense}), 2 * sparse.to_dense() + dense));
  EXPECT_EQ(pairwise_sum({sparse, sparse}).layout(), at::kSparse);
}

}  // namespace
}  // namespace cohort::autograd

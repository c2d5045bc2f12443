#include "cohort/parallel/graph_boundary.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <set>
#include <thread>

#include "cohort/autograd/recompute.h"
#include "cohort/base/error.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

using namespace std::chrono_literals;
namespace nn = torch::nn;
using base::Placement;

nn::Sequential make_perceptron() {
  at::manual_seed(3);
  return nn::Sequential(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 4));
}

at::Tensor boundary_input(bool requires_grad = true) {
  return at::arange(30, at::kFloat).view({5, 6}).sin().requires_grad_(requires_grad);
}

std::shared_ptr<PlacementWorker> worker_of(const char* text) {
  return PlacementWorker::of(Placement::parse(text));
}

Tensors gradients_of(nn::Sequential& net) {
  Tensors gradients;
  for (const at::Tensor& parameter : net->parameters()) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  net->zero_grad();
  return gradients;
}

void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    if (!a[i].defined()) continue;
    EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  }
}

// A part of a net, for run_on_devices.
DevicePart part_of(const char* place, nn::Sequential net, const at::Tensor& x) {
  return DevicePart{
      PartName(std::string("part on ") + place), worker_of(place), {x}, [net](const Tensors& in) mutable {
        return Tensors{net->forward(in.front())};
      }};
}

TEST(GraphBoundaryTest, ValuesAndGradientsAreThoseOfThePlainCall) {
  nn::Sequential net = make_perceptron();
  at::Tensor x = boundary_input(), y = boundary_input();
  const at::Tensor plain = net->forward(x.tanh());
  plain.square().sum().backward();
  const Tensors expected = gradients_of(net);
  const at::Tensor cut = run(Placement::parse("cpu:0"), net, y.tanh());
  cut.square().sum().backward();
  EXPECT_TRUE(at::equal(plain, cut));
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
  expect_equal(gradients_of(net), expected);
}

TEST(GraphBoundaryTest, ForwardAndBackwardRunOnThePlacementsThread) {
  const auto worker = worker_of("cpu:0");
  const auto id = worker->run("id", [] { return std::this_thread::get_id(); });
  std::set<std::thread::id> forward, backward;
  at::Tensor x = boundary_input();
  const at::Tensor y = run(
      worker,
      [&](const at::Tensor& t) {
        forward.insert(std::this_thread::get_id());
        at::Tensor z = t * 2;
        z.register_hook([&](const at::Tensor& gradient) {
          backward.insert(std::this_thread::get_id());
          return gradient;
        });
        return z.sum();
      },
      x);
  y.backward();
  EXPECT_EQ(forward, std::set{id});
  EXPECT_EQ(backward, std::set{id});
  EXPECT_TRUE(at::equal(x.grad(), at::full_like(x, 2)));
}

// Both backwards are inside their graph at the same time: each waits there for the other.
TEST(GraphBoundaryTest, BackwardsOfThePartsOfOneCallRunAtTheSameTime) {
  struct BarrierOfTwo {
    std::mutex mutex;
    std::condition_variable changed;
    int num_arrived = 0;
    bool has_timed_out = false;
    void wait() {
      std::unique_lock lock(mutex);
      ++num_arrived;
      changed.notify_all();
      has_timed_out |= !changed.wait_for(lock, 60s, [&] { return num_arrived == 2; });
    }
  };
  const auto barrier = std::make_shared<BarrierOfTwo>();
  std::vector<DevicePart> parts;
  for (const char* place : {"cpu:0/a", "cpu:0/b"}) {
    parts.push_back({PartName(place), worker_of(place), {boundary_input()}, [barrier](const Tensors& in) {
                       at::Tensor y = in.front() * 3;
                       y.register_hook([barrier](const at::Tensor& gradient) {
                         barrier->wait();
                         return gradient;
                       });
                       return Tensors{y};
                     }});
  }
  const Tensors inputs{parts[0].inputs[0], parts[1].inputs[0]};
  const auto results = run_on_devices(std::move(parts));
  at::cat({results[0][0], results[1][0]}).sum().backward();
  EXPECT_EQ(barrier->num_arrived, 2);
  EXPECT_FALSE(barrier->has_timed_out);
  for (const at::Tensor& input : inputs) EXPECT_TRUE(at::equal(input.grad(), at::full_like(input, 3)));
}

TEST(GraphBoundaryTest, PartsThatShareParametersAddTheirGradientsInOrder) {
  nn::Sequential net = make_perceptron();
  const at::Tensor a = boundary_input(false), b = a + 1, c = a * 2;
  const auto loss_of = [](const at::Tensor& y) { return y.square().sum(); };
  Tensors each;
  std::vector<Tensors> single;
  for (const at::Tensor& x : {a, b, c}) {
    loss_of(net->forward(x)).backward();
    single.push_back(gradients_of(net));
  }
  std::vector<DevicePart> parts;
  parts.push_back(part_of("cpu:0/a", net, a));
  parts.push_back(part_of("cpu:0/b", net, b));
  parts.push_back(part_of("cpu:0/c", net, c));
  const auto results = run_on_devices(std::move(parts));
  (loss_of(results[0][0]) + loss_of(results[1][0]) + loss_of(results[2][0])).backward();
  const Tensors sums = gradients_of(net);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    EXPECT_TRUE(at::equal(sums[i], (single[0][i] + single[1][i]) + single[2][i])) << i;
  }
}

TEST(GraphBoundaryTest, LargeGradientsAreAddedOnTheWorkers) {
  const at::Tensor weight = at::arange(300000, at::kFloat).requires_grad_();
  std::vector<DevicePart> parts;
  for (int i = 0; i < 2; ++i) {
    parts.push_back(
        {PartName("p"), worker_of(i == 0 ? "cpu:0/a" : "cpu:0/b"), {}, [weight, i](const Tensors&) {
           return Tensors{(weight * (i + 1)).sum()};
         }});
  }
  const auto results = run_on_devices(std::move(parts));
  (results[0][0] + 10 * results[1][0]).backward();
  EXPECT_TRUE(at::equal(weight.grad(), at::full_like(weight, 21)));
}

TEST(GraphBoundaryTest, SeveralForwardsBeforeOneBackwardAndARetainedGraph) {
  nn::Sequential net = make_perceptron();
  at::Tensor x = boundary_input();
  const auto worker = worker_of("cpu:0");
  const auto twice = [&](const auto& forward) {
    const at::Tensor loss = (forward(x) * forward(x.cos())).sum();
    torch::autograd::backward({loss}, {}, /*retain_graph=*/true);
    torch::autograd::backward({loss}, {});
    Tensors gradients = gradients_of(net);
    gradients.push_back(x.grad().clone());
    x.mutable_grad().reset();
    return gradients;
  };
  const Tensors plain = twice([&](const at::Tensor& t) { return net->forward(t); });
  expect_equal(twice([&](const at::Tensor& t) { return run(worker, net, t); }), plain);
}

TEST(GraphBoundaryTest, ASecondBackwardWithoutRetainIsRejected) {
  at::Tensor x = boundary_input();
  const at::Tensor y = run(worker_of("cpu:0"), [](const at::Tensor& t) { return t.exp().sum(); }, x);
  y.backward();
  COHORT_EXPECT_THROW_WITH(y.backward(), UsageError, "whose graph has been freed");
}

TEST(GraphBoundaryTest, WithoutGradientsItIsAPlainCall) {
  nn::Sequential net = make_perceptron();
  const at::NoGradGuard no_grad;
  const at::Tensor x = boundary_input(false);
  const at::Tensor y = run(worker_of("cpu:0"), net, x);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(at::equal(y, net->forward(x)));
}

TEST(GraphBoundaryTest, UnusedResultsAndUnusedParametersHaveNoGradient) {
  nn::Linear used(3, 3), unused(3, 3);
  at::Tensor x = at::ones({2, 3}).requires_grad_();
  auto [a, b, count] = run(
      worker_of("cpu:0"),
      [&](const at::Tensor& t) { return std::tuple(used->forward(t), unused->forward(t), std::int64_t(7)); },
      x);
  EXPECT_EQ(count, 7);
  a.sum().backward();
  EXPECT_TRUE(used->weight.grad().defined());
  EXPECT_FALSE(unused->weight.grad().defined());
  EXPECT_TRUE(at::allclose(x.grad(), used->weight.sum(0).expand({2, 3})));
}

TEST(GraphBoundaryTest, NestedInputsAndResultsAndResultsWithoutGradient) {
  std::map<std::string, at::Tensor> input{{"a", boundary_input()}, {"index", at::tensor({1, 0})}};
  const auto result = run(
      worker_of("cpu:0"),
      [](const std::map<std::string, at::Tensor>& in, double scale) {
        return std::vector<at::Tensor>{in.at("a").index_select(0, in.at("index")) * scale, in.at("index") + 1,
                                       at::Tensor(), in.at("a")};
      },
      input, 2.0);
  ASSERT_EQ(result.size(), 4u);
  EXPECT_TRUE(at::equal(result[1], at::tensor({2, 1})));
  EXPECT_FALSE(result[2].defined());
  (result[0].sum() + result[3].sum()).backward();
  at::Tensor expected = at::ones({5, 6});
  expected.slice(0, 0, 2) += 2;
  EXPECT_TRUE(at::equal(input.at("a").grad(), expected)) << "a result that is the input itself too";
}

TEST(GraphBoundaryTest, AutogradGradAsksForSomeGradientsAndLeavesTheOthersAlone) {
  nn::Sequential net = make_perceptron();
  at::Tensor x = boundary_input();
  const Tensors wanted{x, net->parameters().front()};
  const Tensors expected = torch::autograd::grad({net->forward(x).square().sum()}, wanted);
  const Tensors found = torch::autograd::grad({run(worker_of("cpu:0"), net, x).square().sum()}, wanted);
  expect_equal(found, expected);
  for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(GraphBoundaryTest, PartsCallPartsInOneDirection) {
  nn::Sequential first = make_perceptron();
  nn::Linear second(4, 2);
  at::Tensor x = boundary_input(), y = boundary_input();
  second->forward(first->forward(x)).sum().backward();
  const Tensors expected = gradients_of(first);
  const auto outer = worker_of("cpu:0/a"), inner = worker_of("cpu:0/b");
  run(outer, [&](const at::Tensor& t) { return second->forward(run(inner, first, t)); }, y).sum().backward();
  expect_equal(gradients_of(first), expected);
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
  // On the same placement it is a plain call.
  run(outer, [&](const at::Tensor& t) { return second->forward(run(outer, first, t)); }, y).sum().backward();
  expect_equal(gradients_of(first), expected);
}

TEST(GraphBoundaryTest, RecomputationWithinAPart) {
  nn::Sequential net = make_perceptron();
  at::Tensor x = boundary_input(), y = boundary_input();
  net->forward(x).square().sum().backward();
  const Tensors expected = gradients_of(net);
  const auto again = [&](const at::Tensor& t) { return autograd::recompute(net, t); };
  run(worker_of("cpu:0"), again, y).square().sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
  expect_equal(gradients_of(net), expected);
}

TEST(GraphBoundaryTest, HooksOfParametersRunOnceOnTheThreadThatCalledBackward) {
  nn::Sequential net = make_perceptron();
  const at::Tensor weight = net->parameters().front();
  std::vector<std::thread::id> calls;
  weight.register_hook([&](const at::Tensor& gradient) {
    calls.push_back(std::this_thread::get_id());
    return gradient * 2;
  });
  net->forward(boundary_input()).sum().backward();
  const Tensors expected = gradients_of(net);
  calls.clear();
  run(worker_of("cpu:0"), net, boundary_input()).sum().backward();
  EXPECT_EQ(calls, std::vector{std::this_thread::get_id()});
  expect_equal(gradients_of(net), expected);
}

TEST(GraphBoundaryTest, ErrorsNameThePart) {
  nn::Sequential net = make_perceptron();
  std::vector<DevicePart> parts;
  parts.push_back(part_of("cpu:0/a", net, boundary_input()));
  parts.push_back(part_of("cpu:0/b", net, at::ones({2, 5})));
  COHORT_EXPECT_THROW_WITH(run_on_devices(std::move(parts)), c10::Error, "in part on cpu:0/b");
  const auto worker = worker_of("cpu:0");
  COHORT_EXPECT_THROW_WITH(
      run(
          worker, [](const at::Tensor&) -> at::Tensor { throw DataError("test", "no"); }, boundary_input()),
      DataError, "a part on cpu:0: [test] no");
  COHORT_EXPECT_THROW_WITH(
      run(
          worker, [](const at::Tensor&) -> at::Tensor { throw std::out_of_range("far"); }, boundary_input()),
      Error, "a part on cpu:0: far");
  const at::Tensor y = run(
      worker,
      [](const at::Tensor& t) {
        at::Tensor z = t * 2;
        z.register_hook([](const at::Tensor&) -> at::Tensor { throw DataError("test", "in backward"); });
        return z.sum();
      },
      boundary_input());
  COHORT_EXPECT_THROW_WITH(y.backward(), DataError, "a part on cpu:0: [test] in backward");
  EXPECT_TRUE(run(worker, net, boundary_input()).defined()) << "the next step runs";
}

TEST(GraphBoundaryTest, APartThatHangsIsNamedAndTheNextStepRuns) {
  const auto gate = std::make_shared<test::Gate>(), entered = std::make_shared<test::Gate>();
  std::vector<DevicePart> parts;
  parts.push_back(
      {PartName("replica 1"), worker_of("cpu:0"), {boundary_input()}, [gate, entered](const Tensors& in) {
         entered->open();
         gate->wait();
         return in;
       }});
  const auto worker = parts.front().worker;
  COHORT_EXPECT_THROW_WITH(run_on_devices(std::move(parts), {.timeout = 5ms}), TimeoutError,
                           "for replica 1 forward on thread cpu:0");
  entered->wait();  // before it nothing is stuck
  nn::Sequential net = make_perceptron();
  EXPECT_TRUE(at::equal(run(worker, net, boundary_input()), net->forward(boundary_input())));
  gate->open();
}

TEST(GraphBoundaryTest, WhatCannotBeRightIsRejected) {
  nn::Sequential net = make_perceptron();
  const auto worker = worker_of("cpu:0");
  at::Tensor x = boundary_input();
  const at::Tensor outside = x * 2;
  COHORT_EXPECT_THROW_WITH(run(
                               worker, [&](const at::Tensor& t) { return t + outside; }, x),
                           UsageError,
                           "uses a tensor with a graph of its own (MulBackward1) that is not an input");
  const at::Tensor y = run(worker, net, x).sum();
  COHORT_EXPECT_THROW_WITH(torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true), UsageError,
                           "create_graph goes through a part on a placement");
  {
    const at::NoGradGuard no_grad;
    net->parameters().front().add_(1);
  }
  COHORT_EXPECT_THROW_WITH(y.backward(), UsageError, "was changed between its forward and its backward");
  at::Tensor z = run(worker, [](const at::Tensor& t) { return t.exp(); }, x);
  z.add_(1);  // exp's backward needs its result
  COHORT_EXPECT_THROW_WITH(z.sum().backward(), c10::Error, "modified by an inplace operation");
}

TEST(GraphBoundaryTest, SumsInPairsWhoseShapeIsFixed) {
  Tensors values;
  for (int i = 0; i < 5; ++i) values.push_back(at::full({3}, 0.1f * float(i + 1)));
  const Tensors& v = values;
  const at::Tensor expected = ((v[0] + v[1]) + (v[2] + v[3])) + v[4];
  const at::Tensor first = values[0].clone();
  EXPECT_TRUE(at::equal(autograd::pairwise_sum(values), expected));
  EXPECT_TRUE(at::equal(values[0], first)) << "values that others hold stay";
  EXPECT_FALSE(autograd::pairwise_sum({}).defined());
  EXPECT_TRUE(at::equal(autograd::pairwise_sum({at::Tensor(), first, at::Tensor()}), first));
  const at::Tensor wide = at::ones({1}).expand({3});
  EXPECT_TRUE(at::equal(autograd::pairwise_sum({wide, at::ones({3})}), at::full({3}, 2)));
  EXPECT_TRUE(
      at::equal(autograd::pairwise_sum({at::_efficientzerotensor({3}), at::ones({3})}), at::ones({3})));
}

}  // namespace
}  // namespace cohort::parallel

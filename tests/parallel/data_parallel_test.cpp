#include "cohort/parallel/data_parallel.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <string>

#include "cohort/parallel/distributed.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

namespace nn = torch::nn;
using base::parse_placements;

nn::Sequential make_net() {
  at::manual_seed(3);
  return nn::Sequential(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 4));
}

DataParallelOptions on(const char* placements) {
  return {.device_ids = parse_placements(placements)};
}
constexpr const char* kTwo = "cpu:0/a cpu:0/b";
constexpr const char* kThree = "cpu:0/a cpu:0/b cpu:0/c";

at::Tensor batch_of(std::int64_t size) {
  return at::arange(size * 6, at::kFloat).view({size, 6}).sin();
}

Tensors take_gradients(const nn::Module& net) {
  Tensors gradients;
  for (at::Tensor parameter : net.parameters()) {
    gradients.push_back(parameter.grad());
    parameter.mutable_grad().reset();
  }
  return gradients;
}

void expect_close(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    if (!a[i].defined()) continue;
    EXPECT_TRUE(at::allclose(a[i], b[i], 1e-5, 1e-6)) << i << "\n" << a[i] << "\n" << b[i];
  }
}

TEST(DataParallelTest, ForwardAndGradientsAreOneDevicesOnTheWholeBatch) {
  nn::Sequential net = make_net();
  for (const char* placements : {"cpu:0", kTwo, kThree}) {
    DataParallel<nn::Sequential> model(net, on(placements));
    for (const std::int64_t size : {1, 2, 3, 4, 7, 8}) {
      at::Tensor x = batch_of(size).requires_grad_(), y = batch_of(size).requires_grad_();
      const at::Tensor expected = net->forward(x);
      expected.square().mean().backward();
      const Tensors gradients = take_gradients(*net);
      const at::Tensor result = model.forward(y);
      result.square().mean().backward();
      EXPECT_TRUE(at::allclose(result, expected, 1e-6, 1e-7)) << size;
      expect_close(take_gradients(*net), gradients);
      EXPECT_TRUE(at::allclose(x.grad(), y.grad(), 1e-5, 1e-7)) << size;
    }
  }
}

TEST(DataParallelTest, ReplicasShareParametersAndFollowTheOptimizer) {
  nn::Sequential net = make_net(), other = make_net();
  Replicas replicas = replicate(net, parse_placements(kTwo));
  for (std::size_t i = 0; i < 2; ++i) {
    const auto copies = replicas.module(i)->parameters(), own = net->parameters();
    for (std::size_t j = 0; j < own.size(); ++j) {
      EXPECT_EQ(copies[j].data_ptr(), own[j].data_ptr()) << "shared, not copied";
      EXPECT_FALSE(copies[j].is_same(own[j]));
    }
  }
  DataParallel<nn::Sequential> model(net, on(kTwo));
  const at::Tensor x = batch_of(8);
  for (int step = 0; step < 3; ++step) {
    const auto learn = [](nn::Sequential of) {
      const at::NoGradGuard no_grad;
      for (at::Tensor parameter : of->parameters()) parameter.sub_(parameter.grad(), 0.5);
      of->zero_grad();
    };
    const at::Tensor loss = model.forward(x).square().mean(), expected = other->forward(x).square().mean();
    EXPECT_NEAR(loss.item<float>(), expected.item<float>(), 1e-6) << step;
    loss.backward();
    expected.backward();
    learn(net);
    learn(other);
  }
  net->to(at::kDouble);  // other memory for the same parameters
  EXPECT_TRUE(at::allclose(model.forward(x.to(at::kDouble)), net->forward(x.to(at::kDouble))));
  const at::Tensor last = model.forward(x.to(at::kDouble)).sum();
  net->parameters().front().requires_grad_(false);
  model.forward(x.to(at::kDouble)).sum().backward();
  const Tensors gradients = take_gradients(*net);
  EXPECT_FALSE(gradients.front().defined()) << "frozen since";
  EXPECT_TRUE(gradients.back().defined());
}

TEST(DataParallelTest, GradientsAddUpAndMeetHooks) {
  nn::Sequential net = make_net();
  DataParallel<nn::Sequential> model(net, on(kTwo));
  int calls = 0;
  net->parameters().front().register_hook([&](const at::Tensor& gradient) {
    ++calls;
    return gradient;
  });
  net->forward(batch_of(4)).sum().backward();
  net->forward(batch_of(6)).square().sum().backward();
  const Tensors expected = take_gradients(*net);
  calls = 0;
  const at::Tensor first = model.forward(batch_of(4)).sum(),
                   second = model.forward(batch_of(6)).square().sum();
  first.backward();
  second.backward();
  EXPECT_EQ(calls, 2);
  expect_close(take_gradients(*net), expected);
  const Tensors wanted{net->parameters().back()};
  expect_close(torch::autograd::grad({model.forward(batch_of(4)).sum()}, wanted),
               torch::autograd::grad({net->forward(batch_of(4)).sum()}, wanted));
}

struct Record {
  at::Tensor values;
  std::map<std::string, at::Tensor> by_name;
  std::vector<std::pair<at::Tensor, std::int64_t>> list;
  std::string text;
};
COHORT_NESTED(Record, values, by_name, list, text)

struct NestedNetImpl : nn::Cloneable<NestedNetImpl> {
  NestedNetImpl() { NestedNetImpl::reset(); }
  void reset() override { layer = register_module("layer", nn::Linear(6, 4)); }
  Record forward(const Record& in, double scale) {
    const at::Tensor y = layer->forward(in.values) * scale;
    return {y, {{"sum", y.sum()}, {"x", in.by_name.at("x") + 1}}, {{y.square(), in.list[0].second}}, in.text};
  }
  nn::Linear layer{nullptr};
};
TORCH_MODULE(NestedNet);

TEST(DataParallelTest, NestedInputsAndResults) {
  NestedNet net;
  const Record in{batch_of(5), {{"x", at::arange(5)}}, {{at::ones({5, 2}), 3}}, "kept"};
  DataParallel<NestedNet> model(net, on(kTwo));
  const Record expected = net->forward(in, 2.0), result = model.forward(in, 2.0);
  EXPECT_TRUE(at::allclose(result.values, expected.values));
  EXPECT_TRUE(at::equal(result.by_name.at("x"), at::arange(5) + 1));
  EXPECT_TRUE(at::allclose(result.list[0].first, expected.list[0].first));
  EXPECT_EQ(result.list[0].second, 3);
  EXPECT_EQ(result.text, "kept");
  EXPECT_EQ(result.by_name.at("sum").sizes(), (std::vector<std::int64_t>{2})) << "one number of each replica";
  EXPECT_TRUE(at::allclose(result.by_name.at("sum").sum(), expected.by_name.at("sum")));
}

TEST(DataParallelTest, AModuleThatBeginsInPlace) {
  nn::Sequential net(nn::ReLU(nn::ReLUOptions(true)), nn::Linear(6, 4));
  DataParallel<nn::Sequential> model(net, on(kTwo));
  const auto train = [&](auto& module) {
    const at::Tensor x = batch_of(5).requires_grad_(), h = x * 2;
    const at::Tensor y = module.forward(h);
    (y.square().sum() + (h * h).sum()).backward();
    return std::vector<at::Tensor>{y.detach(), h.detach(), x.grad()};
  };
  const auto expected = train(*net), found = train(model);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-5, 1e-6)) << i;
}

TEST(DataParallelTest, AModuleThatChangesItsBatch) {
  nn::Sequential net(nn::Functional([](const at::Tensor& x) { return at::Tensor(x).mul_(2); }),
                     nn::Linear(6, 4));
  DataParallel<nn::Sequential> model(net, on(kTwo));
  const at::Tensor x = batch_of(5), twin = x.clone();
  net->forward(twin).square().sum().backward();
  const Tensors expected = take_gradients(*net);
  model.forward(x).square().sum().backward();
  expect_close(take_gradients(*net), expected);
  EXPECT_TRUE(at::equal(x, twin));
}

struct ScaleImpl : nn::Cloneable<ScaleImpl> {
  ScaleImpl() { reset(); }
  void reset() override { scale = register_parameter("scale", at::arange(1, 7, at::kFloat)); }
  at::Tensor forward(at::Tensor x) { return x.mul_(scale); }
  at::Tensor scale;
};
TORCH_MODULE(Scale);

// The batch has a gradient from then on.
TEST(DataParallelTest, AModuleThatScalesItsBatchByAParameter) {
  nn::Sequential net{Scale(), nn::Linear(6, 4)};
  for (const char* devices : {"cpu:0", kTwo}) {
    DataParallel<nn::Sequential> model(net, on(devices));
    for (const bool is_view : {false, true}) {
      const auto train = [&](auto& module) {
        const at::Tensor base = batch_of(7), x = is_view ? base.narrow(0, 1, 5) : base;
        const at::Tensor y = module.forward(x);
        EXPECT_TRUE(x.requires_grad());
        (y.square().sum() + (x * x).sum() + base.sum()).backward();
        Tensors seen = take_gradients(*net);
        seen.push_back(base.detach());
        return seen;
      };
      const Tensors expected = train(*net);
      expect_close(train(model), expected);
    }
  }
}

struct SumImpl : nn::Cloneable<SumImpl> {
  SumImpl() { reset(); }
  void reset() override {
    for (const char* name : {"a", "b"}) register_parameter(name, at::ones({6}));
    for (const char* name : {"c", "d"}) register_parameter(name, at::ones({2, 3}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto all = parameters();
    return x * (all[0] + all[1] + all[2].view({6}) + all[3].view({6}));
  }
};
TORCH_MODULE(Sum);

// LibTorch gives all four one gradient, or views of it, and adds to what it gave where it is asked again.
TEST(DataParallelTest, GradientsOfOneMemoryAddUpApart) {
  Sum net;
  for (const char* devices : {"cpu:0", kTwo}) {
    DataParallel<Sum> model(net, on(devices));
    for (int i = 0; i < 3; ++i) model.forward(batch_of(5)).sum().backward();
    for (const at::Tensor& gradient : take_gradients(*net)) {
      EXPECT_TRUE(at::allclose(gradient.view({6}), batch_of(5).sum(0) * 3)) << devices << gradient;
    }
  }
}

TEST(DataParallelTest, AnInputThatChangesBeforeBackwardIsAnErrorWhereItWasSaved) {
  nn::Sequential saves(nn::Linear(6, 4)), saves_not(nn::ReLU(), nn::Linear(6, 4));
  DataParallel<nn::Sequential> model(saves, on(kTwo)), other(saves_not, on(kTwo));
  for (const bool is_view : {false, true}) {
    const at::Tensor base = batch_of(5).requires_grad_() * 2, h = is_view ? base.narrow(0, 1, 4) : base;
    const at::Tensor y = model.forward(h), z = other.forward(h);
    z.sum().backward({}, /*retain_graph=*/true);
    h.detach().add_(1);
    COHORT_EXPECT_THROW_WITH(y.sum().backward(), c10::Error, "modified by an inplace operation");
    z.sum().backward();  // saved the results of ReLU
  }
}

TEST(DataParallelTest, AnotherDimensionAndAnotherOutputDevice) {
  nn::Sequential net(nn::Linear(6, 4));
  DataParallelOptions options = on(kThree);
  options.dim = 1;
  options.output_device = base::Placement::parse("cpu:0/c");
  DataParallel<nn::Sequential> model(net, options);
  const at::Tensor x = at::randn({2, 7, 6});
  EXPECT_TRUE(at::allclose(model.forward(x), net->forward(x), 1e-5, 1e-6));
}

TEST(DataParallelTest, WithoutPlacementsItIsAPlainCall) {
  nn::Sequential net = make_net();
  EXPECT_TRUE(at::equal(data_parallel(net, {}, batch_of(4)), net->forward(batch_of(4))));
  EXPECT_TRUE(at::allclose(data_parallel(net, on(kTwo), batch_of(4)), net->forward(batch_of(4))));
}

TEST(DataParallelTest, BatchNormUsesEachReplicasPartAndKeepsTheFirstsStatistics) {
  nn::Sequential net(nn::Linear(6, 3), nn::BatchNorm1d(3)), other(nn::Linear(6, 3), nn::BatchNorm1d(3));
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 4; ++i) other->parameters()[i].copy_(net->parameters()[i]);
  }
  DataParallel<nn::Sequential> model(net, on(kTwo));
  const at::Tensor x = batch_of(8) * 3;
  for (int step = 0; step < 2; ++step) {
    const at::Tensor y = model.forward(x);
    EXPECT_TRUE(at::allclose(y.slice(0, 0, 4), other->forward(x.slice(0, 0, 4)), 1e-5, 1e-6));
  }
  const auto own = net->buffers(), expected = other->buffers();
  for (std::size_t i = 0; i < own.size(); ++i) EXPECT_TRUE(at::allclose(own[i], expected[i])) << i;
  net->eval();
  EXPECT_TRUE(at::allclose(model.forward(x), net->forward(x), 1e-5, 1e-6))
      << "evaluation reaches the replicas";
  net->train();
  net[1]->as<nn::BatchNorm1d>()->eval();
  EXPECT_TRUE(at::allclose(model.forward(x), net->forward(x), 1e-5, 1e-6)) << "of one layer alone too";
}

TEST(DataParallelTest, SeveralForwardsBeforeOneBackwardWithBatchNorm) {
  nn::Sequential net(nn::Linear(6, 3), nn::BatchNorm1d(3), nn::Tanh());
  DataParallel<nn::Sequential> model(net, on(kTwo));
  const at::Tensor a = batch_of(8), b = batch_of(8).cos();
  const auto halves = [&](const at::Tensor& x) {
    return at::cat({net->forward(x.slice(0, 0, 4)), net->forward(x.slice(0, 4, 8))});
  };
  (halves(a) * halves(b)).sum().backward();
  const Tensors expected = take_gradients(*net);
  const at::Tensor first = model.forward(a), second = model.forward(b);
  (first * second).sum().backward();
  expect_close(take_gradients(*net), expected);
}

TEST(DataParallelTest, RandomNumbersAreAFunctionOfTheCallersGeneratorAndTheReplica) {
  nn::Sequential net(nn::Dropout(0.5));
  const auto draw = [&](const char* placements, std::uint64_t seed) {
    DataParallel<nn::Sequential> model(net, on(placements));
    at::manual_seed(seed);
    const at::Tensor output = model.forward(at::ones({4, 50}));
    return std::pair(output, model.forward(at::ones({4, 50})));
  };
  const auto [first, second] = draw(kTwo, 1);
  EXPECT_TRUE(at::equal(first, draw(kTwo, 1).first));
  EXPECT_FALSE(at::equal(first, second));
  EXPECT_FALSE(at::equal(first, draw(kTwo, 2).first));
  EXPECT_FALSE(at::equal(first.slice(0, 0, 2), first.slice(0, 2, 4)));
  // One thread with the same keys draws the same.
  at::manual_seed(1);
  core::RandomKey key = core::RandomKey::draw();
  Tensors parts;
  for (key.part = 0; key.part < 2; ++key.part) {
    const core::RandomScope scope(key);
    parts.push_back(net->forward(at::ones({2, 50})));
  }
  EXPECT_TRUE(at::equal(at::cat(parts), first));
  // Making replicas, and evaluating, moves nothing.
  net->eval();
  at::manual_seed(1);
  const at::Tensor expected = at::rand({3});
  at::manual_seed(1);
  nn::Sequential deep = net;
  deep->push_back(nn::Linear(50, 2));
  deep->eval();
  at::manual_seed(1);
  DataParallel<nn::Sequential>(deep, on(kTwo)).forward(at::ones({4, 50}));
  EXPECT_TRUE(at::equal(at::rand({3}), expected));
}

// A model with one block on several placements that are not neighbours, and the next elsewhere.
struct BlocksImpl : nn::Module {
  BlocksImpl()
      : block1(register_module("block1", nn::Linear(6, 8))),
        inner(register_module("block2", nn::Sequential(nn::Linear(8, 8), nn::Tanh()))),
        block2(inner, on("cpu:0/a cpu:0/c")),
        block3(register_module("block3", nn::Linear(8, 2))) {}
  at::Tensor forward(const at::Tensor& x, bool plain) {
    at::Tensor y = block1->forward(x);
    y = plain ? inner->forward(y) : block2.forward(y);
    return run(base::Placement::parse("cpu:0/b"), block3, y);
  }
  nn::Linear block1;
  nn::Sequential inner;
  DataParallel<nn::Sequential> block2;
  nn::Linear block3;
};
TORCH_MODULE(Blocks);

TEST(DataParallelTest, ASubmoduleAlone) {
  Blocks net;
  const auto names = net->named_parameters().keys();
  EXPECT_EQ(names[2], "block2.0.weight") << "its parameters have their own names";
  net->forward(batch_of(5), true).square().sum().backward();
  const Tensors expected = take_gradients(*net);
  net->forward(batch_of(5), false).square().sum().backward();
  expect_close(take_gradients(*net), expected);
}

// One parameter under two names: a clone has two of it.
struct TiedImpl : nn::Cloneable<TiedImpl> {
  TiedImpl() { TiedImpl::reset(); }
  void reset() override {
    first = register_parameter("first", at::ones({4, 4}) / 3);
    second = register_parameter("second", at::ones({4, 4}) / 3);
  }
  void tie() {
    second = first;
    parameters_["second"] = first;
  }
  at::Tensor forward(const at::Tensor& x) { return x.mm(first).tanh().mm(second); }
  at::Tensor first, second;
};
TORCH_MODULE(Tied);

TEST(DataParallelTest, TiedParametersGetOneGradient) {
  Tied net;
  net->tie();
  const at::Tensor x = batch_of(6).slice(1, 0, 4);
  net->forward(x).square().sum().backward();
  const at::Tensor expected = net->first.grad().clone();
  net->first.mutable_grad().reset();
  DataParallel<Tied>(net, on(kTwo)).forward(x).square().sum().backward();
  EXPECT_TRUE(at::allclose(net->first.grad(), expected, 1e-5, 1e-5));
}

struct PlainImpl : nn::Module {
  PlainImpl() : fc(register_module("fc", nn::Linear(6, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return fc->forward(x); }
  nn::Linear fc;
};
TORCH_MODULE(Plain);

TEST(DataParallelTest, APlainModuleIsRejectedByNameAndTakesAFactory) {
  Plain net;
  DataParallel<Plain> model(net, on(kTwo));
  COHORT_EXPECT_THROW_WITH(model.forward(batch_of(4)), UsageError, "cannot copy the module (");
  COHORT_EXPECT_THROW_WITH(model.forward(batch_of(4)), UsageError, "void reset() override");
  nn::Sequential around(nn::Linear(6, 6), Plain());
  DataParallel<nn::Sequential> outer(around, on(kTwo));
  COHORT_EXPECT_THROW_WITH(outer.forward(batch_of(4)), UsageError, "cannot copy \"1\" (");
  DataParallel<Plain> made(net, on(kTwo), [] { return Plain(); });
  EXPECT_TRUE(at::allclose(made.forward(batch_of(4)), net->forward(batch_of(4))));
  made.forward(batch_of(4)).sum().backward();
  EXPECT_TRUE(net->fc->weight.grad().defined());
  DataParallel<nn::Linear> wrong(nn::Linear(6, 2), on(kTwo), [] { return nn::Linear(6, 3); });
  COHORT_EXPECT_THROW_WITH(wrong.forward(batch_of(4)), UsageError,
                           "got weight [3, 6], expected weight [2, 6]");
}

TEST(DataParallelTest, ErrorsHaveTheReplicasIndex) {
  nn::Sequential net = make_net();
  DataParallel<nn::Sequential> model(net, on(kTwo));
  COHORT_EXPECT_THROW_WITH(model.forward(at::ones({4, 5})), c10::Error, "in replica 0 on cpu:0/a");
  const at::Tensor loss = model.forward(batch_of(4)).sum();
  {
    const at::NoGradGuard no_grad;
    net->parameters().front().add_(1);
  }
  COHORT_EXPECT_THROW_WITH(loss.backward(), UsageError,
                           "changed between the replicas' forward and their backward");
  COHORT_EXPECT_THROW_WITH((DataParallel<nn::Sequential>(net, on("cpu:0 cpu:0"))), UsageError,
                           "placement cpu:0 is given twice");
}

// Two ranks, each with two replicas, against one process on the joined batch.
TEST(DataParallelTest, WithinRanksOfDistributedDataParallel) {
  nn::Sequential whole = make_net();
  const at::Tensor x = batch_of(12);
  whole->forward(x).square().mean().backward();
  const auto states = whole->parameters();
  test::run_ranks(2, "shm", [&](comm::Group& group) {
    nn::Sequential net(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 4));
    {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < states.size(); ++i) net->parameters()[i].copy_(states[i]);
    }
    const std::string rank = std::to_string(group.rank());
    DataParallelOptions options = on(("cpu:0/a" + rank + " cpu:0/b" + rank).c_str());
    using Parallel = DataParallel<nn::Sequential>;
    DistributedDataParallel<Parallel> model(Parallel(net, options), group);
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model.forward(x.chunk(2)[group.rank()]).square().mean().backward();
      for (std::size_t i = 0; i < states.size(); ++i) {
        EXPECT_TRUE(at::allclose(net->parameters()[i].grad(), states[i].grad(), 1e-5, 1e-7)) << i;
      }
    }
  });
}

TEST(ScatterTest, CutsAsChunkDoesAndSaysWhatDoesNotFit) {
  const auto placements = parse_placements(kThree);
  for (const std::int64_t size : {1, 2, 3, 4, 5, 6, 7, 100}) {
    const at::Tensor x = batch_of(size);
    const auto parts = scatter(x, placements);
    const auto expected = x.chunk(3);
    ASSERT_EQ(parts.size(), expected.size()) << size;
    for (std::size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(at::equal(parts[i], expected[i]));
    EXPECT_EQ(parts[0].data_ptr(), x.data_ptr()) << "a view";
    EXPECT_TRUE(at::equal(gather(parts, placements[0]), x));
  }
  EXPECT_EQ(scatter(batch_of(0), placements).size(), 1u);
  EXPECT_EQ(scatter(std::pair(at::scalar_tensor(2.0), 3), placements).size(), 3u) << "goes to all";
  COHORT_EXPECT_THROW_WITH(scatter(std::pair(batch_of(6), batch_of(1)), placements), UsageError,
                           "are cut into 3 and 1 parts along dimension 0");
  COHORT_EXPECT_THROW_WITH(scatter(batch_of(6), placements, 2), UsageError, "has no dimension 2");
  const std::vector<std::vector<at::Tensor>> ragged{{at::ones({2})}, {at::ones({2}), at::ones({2})}};
  COHORT_EXPECT_THROW_WITH(gather(ragged, placements[0]), UsageError, "the two structures differ");
}

TEST(ParallelApplyTest, ModulesOfTheirOwn) {
  std::vector<nn::Sequential> nets{make_net(), make_net()};
  std::vector<std::tuple<at::Tensor>> inputs{{batch_of(2)}, {batch_of(3)}};
  const auto results = parallel_apply(nets, inputs, parse_placements(kTwo));
  ASSERT_EQ(results.size(), 2u);
  (results[0].sum() + results[1].sum()).backward();
  for (std::size_t i = 0; i < 2; ++i) {
    const Tensors found = take_gradients(*nets[i]);
    nets[i]->forward(std::get<0>(inputs[i])).sum().backward();
    expect_close(found, take_gradients(*nets[i]));
  }
}

}  // namespace
}  // namespace cohort::parallel

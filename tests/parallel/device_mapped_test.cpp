#include "cohort/parallel/device_mapped.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "cohort/models/registry.h"
#include "cohort/models/resnet.h"
#include "cohort/parallel/distributed.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

namespace nn = torch::nn;
using base::Placement;

struct ToyImpl : nn::Module {
  ToyImpl(const char* first, const char* second)
      : net1(register_module("net1", nn::Linear(10, 10)), Placement::parse(first)),
        net2(register_module("net2", nn::Linear(10, 5)), Placement::parse(second)) {}
  at::Tensor forward(const at::Tensor& x) { return net2.forward(at::relu(net1.forward(x))); }
  DeviceMapped<nn::Linear> net1, net2;
};
TORCH_MODULE(Toy);

TEST(DeviceMappedTest, AModelInTwoPartsTrainsAsOnOneDevice) {
  at::manual_seed(1);
  Toy toy("cpu:0/a", "cpu:0/b");
  EXPECT_EQ(toy->named_parameters().keys(),
            (std::vector<std::string>{"net1.weight", "net1.bias", "net2.weight", "net2.bias"}));
  at::manual_seed(1);
  nn::Linear first(10, 10), second(10, 5);
  nn::Sequential plain(first, nn::ReLU(), second);
  torch::optim::SGD own(toy->parameters(), 0.1), other(plain->parameters(), 0.1);
  const at::Tensor x = at::randn({20, 10}), y = at::randn({20, 5});
  for (int step = 0; step < 3; ++step) {
    const auto train = [&](auto& model, auto& optimizer) {
      optimizer.zero_grad();
      const at::Tensor loss = at::mse_loss(model->forward(x), y);
      loss.backward();
      optimizer.step();
      return loss.template item<float>();
    };
    EXPECT_EQ(train(toy, own), train(plain, other)) << step;
  }
  for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(toy->parameters()[i], plain->parameters()[i]));
}

TEST(DeviceMappedTest, AnEmbeddingBesideALinearLayer) {
  DeviceMapped<nn::Embedding> embedding(nn::Embedding(20, 8), Placement::parse("cpu:0/a"));
  DeviceMapped<nn::Linear> linear(nn::Linear(8, 2), Placement::parse("cpu:0/b"));
  const at::Tensor words = at::tensor({1, 5, 1, 7});
  linear.forward(embedding.forward(words)).square().sum().backward();
  const at::Tensor found = embedding->weight.grad().clone();
  embedding->weight.mutable_grad().reset();
  linear.module()->forward(embedding.module()->forward(words)).square().sum().backward();
  EXPECT_TRUE(at::equal(found, embedding->weight.grad()));
}

TEST(DeviceMappedTest, AModuleThatBeginsInPlace) {
  DeviceMapped<nn::Sequential> placed(nn::Sequential(nn::ReLU(nn::ReLUOptions(true)), nn::Linear(4, 2)),
                                      Placement::parse("cpu:0"));
  const auto train = [](auto&& forward, bool is_view) {
    const at::Tensor x = at::arange(-6, 6, at::kFloat).view({3, 4}).requires_grad_();
    const at::Tensor base = x * 2, h = is_view ? base.narrow(0, 1, 2) : base;
    const at::Tensor y = forward(h);
    (y.square().sum() + (base * base).sum()).backward();  // who uses the input afterwards sees what changed
    return std::vector<at::Tensor>{y.detach(), base.detach(), x.grad()};
  };
  for (const bool is_view : {false, true}) {
    const auto expected = train([&](const at::Tensor& h) { return placed.module()->forward(h); }, is_view);
    const auto found = train([&](const at::Tensor& h) { return placed.forward(h); }, is_view);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i << " " << is_view;
  }
  COHORT_EXPECT_THROW_WITH(placed.forward(at::ones({2, 4}).requires_grad_()), c10::Error, "leaf");
}

TEST(DeviceMappedTest, ErrorsNameTheModule) {
  DeviceMapped<nn::Linear> linear(nn::Linear(8, 2), Placement::parse("cpu:0"));
  COHORT_EXPECT_THROW_WITH(linear.forward(at::ones({2, 3})), c10::Error, "LinearImpl on cpu:0");
}

TEST(DeviceMappedTest, DropoutDrawsAsThePlainModuleDoes) {
  DeviceMapped<nn::Dropout> placed(nn::Dropout(0.5), Placement::parse("cpu:0"));
  const at::Tensor x = at::ones({50});
  at::manual_seed(2);
  const at::Tensor expected = placed.module()->forward(x);
  at::manual_seed(2);
  EXPECT_TRUE(at::equal(placed.forward(x), expected));
  const auto in_scope = [&](const auto& draw) {
    const core::RandomScope scope(core::RandomKey{.seed = 3});
    return at::cat({draw(), draw()});
  };
  EXPECT_TRUE(at::equal(in_scope([&] { return placed.forward(x); }),
                        in_scope([&] { return placed.module()->forward(x); })));
}

// Two ranks, each on two placements, against one process on the joined batch.
TEST(DeviceMappedTest, RanksOfDistributedDataParallelSpanTwoPlacementsEach) {
  const at::Tensor x = at::arange(80, at::kFloat).view({8, 10}).sin(), y = at::ones({8, 5});
  const auto make = [](int rank) {
    const std::string first = "cpu:0/first" + std::to_string(rank),
                      second = "cpu:0/second" + std::to_string(rank);
    Toy toy(first.c_str(), second.c_str());
    const at::NoGradGuard no_grad;
    for (at::Tensor parameter : toy->parameters()) {
      parameter.copy_(at::arange(parameter.numel(), at::kFloat).view_as(parameter).cos() / 4);
    }
    return toy;
  };
  Toy whole = make(9);
  at::mse_loss(whole->forward(x), y).backward();
  test::run_ranks(2, "shm", [&](comm::Group& group) {
    DistributedDataParallel<Toy> model(make(group.rank()), group);
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      at::mse_loss(model.forward(x.chunk(2)[group.rank()]), y.chunk(2)[group.rank()]).backward();
      for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(at::allclose(model->parameters()[i].grad(), whole->parameters()[i].grad(), 1e-5, 1e-7))
            << i;
      }
    }
  });
}

TEST(ApplyDeviceMapTest, PlacesLayersOfASequentialByName) {
  at::manual_seed(1);
  nn::Sequential net(nn::Linear(4, 8), nn::Tanh(), nn::Linear(8, 2));
  const auto names = net->named_parameters().keys();
  const at::Tensor x = at::randn({5, 4});
  const auto step = [&] {
    const at::Tensor y = net->forward(x);
    y.square().sum().backward();
    Tensors all{y.detach()};
    for (const at::Tensor& parameter : net->parameters()) all.push_back(parameter.grad().clone());
    net->zero_grad();
    return all;
  };
  const Tensors expected = step();
  EXPECT_EQ(apply_device_map(*net, {{"0", Placement::parse("cpu:0/a")}, {"2", Placement::parse("cpu:0/b")}}),
            2);
  const Tensors found = step();
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
  EXPECT_EQ(net->named_parameters().keys(), names);
}

TEST(ApplyDeviceMapTest, PlacesTheBlocksOfAResNet) {
  models::ModelOptions options;
  options.name = "resnet18";
  options.num_classes = 3;
  options.width = 0.125;
  models::ResNet net(options);
  net->eval();
  const at::Tensor x = at::randn({2, 3, 32, 32});
  const at::Tensor expected = net->forward(x);
  EXPECT_EQ(apply_device_map(*net, {{"layer1", Placement::parse("cpu:0/a")},
                                    {"layer3.1", Placement::parse("cpu:0/a")},
                                    {"layer4", Placement::parse("cpu:0/b")}}),
            5);
  EXPECT_TRUE(at::equal(net->forward(x), expected));
}

TEST(ApplyDeviceMapTest, RejectsWhatIsCalledByItsTypeAndPlacesNothingThen) {
  models::ModelOptions options;
  options.name = "resnet18";
  options.width = 0.125;
  models::ResNet net(options);
  const auto placement = Placement::parse("cpu:0");
  COHORT_EXPECT_THROW_WITH(apply_device_map(*net, {{"fc", placement}}), UsageError,
                           "calls by its type, so it cannot be placed by name");
  COHORT_EXPECT_THROW_WITH(apply_device_map(*net, {{"fc", placement}}), UsageError,
                           "fc(register_module(\"fc\", ...), base::Placement::parse(\"cpu:0\"))");
  COHORT_EXPECT_THROW_WITH(apply_device_map(*net, {{"layer5", placement}}), UsageError,
                           "there is no module \"layer5\"");
}

}  // namespace
}  // namespace cohort::parallel

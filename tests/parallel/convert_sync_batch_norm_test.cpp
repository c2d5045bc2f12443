#include "cohort/parallel/convert_sync_batch_norm.h"

#include <ATen/ops/arange.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "cohort/base/error.h"
#include "cohort/core/any_layer.h"
#include "cohort/models/registry.h"
#include "cohort/models/summary.h"
#include "cohort/parallel/average.h"
#include "cohort/parallel/sync_batch_norm.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort {
namespace {

namespace nn = torch::nn;

// A user's own: its forward calls the norm by its type.
struct BlockImpl : nn::Module {
  BlockImpl() {
    linear = register_module("linear", nn::Linear(4, 4));
    bn = register_module("bn", nn::BatchNorm1d(4));
  }
  at::Tensor forward(const at::Tensor& x) { return bn(linear(x)); }
  nn::Linear linear = nullptr;
  nn::BatchNorm1d bn = nullptr;
};
TORCH_MODULE(Block);

struct NetImpl : nn::Module {
  NetImpl() {
    parts = register_module("parts", nn::Sequential(nn::Linear(4, 4), nn::BatchNorm1d(4)));
    block = register_module("block", Block());
  }
  nn::Sequential parts = nullptr;
  Block block = nullptr;
};

// A Sequential within a module within a Sequential.
struct PartsImpl : nn::Cloneable<PartsImpl> {
  PartsImpl() { reset(); }
  void reset() override {
    const auto options = nn::BatchNormOptions(6).eps(0.01).momentum(0.3);
    inner = register_module("inner", nn::Sequential(nn::BatchNorm2d(options), nn::ReLU()));
  }
  at::Tensor forward(at::Tensor x) { return inner->forward(x); }
  nn::Sequential inner = nullptr;
};
TORCH_MODULE(Parts);

nn::Sequential make_normed_net() {
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 6, 3)), Parts(),
                     nn::BatchNorm2d(nn::BatchNormOptions(6).affine(false)));
  net->to(at::kDouble);
  return net;
}

at::Tensor images(std::int64_t count) {
  return (at::arange(count * 3 * 25, at::kDouble) * 12.9898).sin().view({count, 3, 5, 5});
}

TEST(ConvertSyncBatchNormTest, ReplacesTheNormsOfSequentialsAndKeepsTheirState) {
  nn::Sequential whole = make_normed_net();
  whole->forward(images(4));  // running statistics of its own
  std::vector<nn::Sequential> copies;
  for (int rank = 0; rank < 2; ++rank) {
    copies.emplace_back(std::dynamic_pointer_cast<nn::SequentialImpl>(whole->clone()));
  }
  const at::Tensor y = whole->forward(images(6));
  y.square().sum().backward();
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    nn::Sequential& net = copies[static_cast<std::size_t>(group.rank())];
    const auto names = net->named_parameters().keys();
    const std::vector<at::Tensor> before = net->parameters();
    EXPECT_EQ(parallel::convert_sync_batch_norm(*net, group), 2);
    EXPECT_EQ(net->named_parameters().keys(), names);
    EXPECT_EQ(net->named_buffers().keys(), whole->named_buffers().keys());
    const std::vector<at::Tensor> after = net->parameters();
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(before[i].is_same(after[i]));
    const at::Tensor part = net->forward(images(6).narrow(0, group.rank() * 2, 2 + 2 * group.rank()));
    part.square().sum().backward();
    EXPECT_TRUE(at::allclose(part, y.narrow(0, group.rank() * 2, 2 + 2 * group.rank()), 1e-10, 1e-10));
    const auto buffers = net->named_buffers();
    for (const auto& want : whole->named_buffers()) {
      EXPECT_TRUE(at::allclose(buffers[want.key()], want.value(), 1e-10, 1e-10)) << want.key();
    }
    const auto parameters = net->named_parameters();
    for (const auto& want : whole->named_parameters()) {
      at::Tensor sum = parameters[want.key()].grad();
      group.all_reduce(sum).wait();
      EXPECT_TRUE(at::allclose(sum, want.value().grad(), 1e-9, 1e-9)) << want.key();
    }
    EXPECT_EQ(parallel::convert_sync_batch_norm(*net, group), 0);  // there is none left
  });
}

// A user's own whose norm can be replaced.
struct HostImpl : nn::Module, core::LayerHost {
  HostImpl() : bn(nn::BatchNorm1d(4)) { register_module("bn", bn.ptr()); }
  core::AnyLayer* find_layer(const std::string& name) override { return name == "bn" ? &bn : nullptr; }
  core::AnyLayer bn;
};

TEST(ConvertSyncBatchNormTest, ReplacesWhatAModuleKeepsAsAnyLayer) {
  test::run_ranks(1, "gloo", [](comm::Group& group) {
    HostImpl host;
    EXPECT_EQ(parallel::convert_sync_batch_norm(host, group), 1);
    EXPECT_NE(host.bn.ptr()->as<parallel::SyncBatchNorm1d>(), nullptr);
    EXPECT_EQ(host.named_children()["bn"], host.bn.ptr());
  });
}

torch::nn::AnyModule make_small(const std::string& name) {
  at::manual_seed(4);
  models::ModelOptions options;
  options.name = name;
  options.num_classes = 4;
  options.width = 0.125;
  options.image_size = 32;
  if (name.starts_with("vgg")) options.head = "linear";
  torch::nn::AnyModule model = models::make_model(options);
  model.ptr()->to(at::kDouble);
  return model;
}

// One step with `model` on `share` of the batch, gradients averaged over `group` where there is one.
void train_step(torch::nn::AnyModule& model, const at::Tensor& images, const comm::Group& group = {}) {
  constexpr double kBatch = 8;
  const at::Tensor sum = model.forward(images).square().sum();
  (sum * ((group ? group.size() : 1) / kBatch)).backward();
  if (group) parallel::GradientAverager(group).average(model.ptr()->parameters(), 1);
}

class ConvertModelTest : public testing::TestWithParam<const char*> {};

TEST_P(ConvertModelTest, TwoRanksGiveWhatOneProcessGivesOnTheJoinedBatch) {
  const at::Tensor images = (at::arange(8 * 3 * 32 * 32, at::kDouble) * 12.9898).sin().view({8, 3, 32, 32});
  torch::nn::AnyModule whole = make_small(GetParam());
  for (const std::int64_t first : {4, 7, 8}) {  // samples of rank 0
    std::vector<torch::nn::AnyModule> copies;
    for (int rank = 0; rank < 2; ++rank) copies.push_back(whole.clone());
    torch::nn::AnyModule expected = whole.clone();
    train_step(expected, images);
    test::run_ranks(2, "gloo", [&](comm::Group& group) {
      torch::nn::AnyModule& converted = copies[static_cast<std::size_t>(group.rank())];
      const auto names = converted.ptr()->named_parameters().keys();
      EXPECT_GT(parallel::convert_sync_batch_norm(*converted.ptr(), group), 7);
      torch::nn::AnyModule model = converted.clone();  // which is converted too
      EXPECT_EQ(model.ptr()->named_parameters().keys(), names);
      train_step(model, group.rank() == 0 ? images.narrow(0, 0, first) : images.narrow(0, first, 8 - first),
                 group);
      const auto buffers = model.ptr()->named_buffers();
      for (const auto& want : expected.ptr()->named_buffers()) {
        EXPECT_TRUE(at::allclose(buffers[want.key()], want.value(), 1e-9, 1e-10)) << want.key();
      }
      const auto parameters = model.ptr()->named_parameters();
      for (const auto& want : expected.ptr()->named_parameters()) {
        const at::Tensor got = parameters[want.key()].grad(), gradient = want.value().grad();
        const double scale = gradient.abs().max().item<double>();
        EXPECT_LE((got - gradient).abs().max().item<double>(), 1e-8 * scale + 1e-12) << want.key();
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ConvertModelTest, testing::Values("resnet18", "resnet50", "vgg11_bn"));

TEST(ConvertSyncBatchNormTest, ASummaryOfAConvertedModelCountsItsNorms) {
  torch::nn::AnyModule model = make_small("resnet18");
  const auto before = models::summarize(model, {1, 3, 32, 32});
  test::run_ranks(1, "gloo", [&](comm::Group& group) {
    EXPECT_EQ(parallel::convert_sync_batch_norm(*model.ptr(), group), 20);
    const auto after = models::summarize(model, {1, 3, 32, 32});
    EXPECT_EQ(after.flops, before.flops);
    EXPECT_EQ(after.rows.size(), before.rows.size());
    EXPECT_EQ(after.rows[1].name, "bn1");
    EXPECT_EQ(after.rows[1].type, "SyncBatchNorm2d");
  });
}

TEST(ConvertSyncBatchNormTest, ANormWithTwoNamesStaysOne) {
  test::run_ranks(1, "gloo", [](comm::Group& group) {
    const nn::BatchNorm1d norm(4);
    nn::Sequential net(norm, nn::Linear(4, 4), norm);
    net->eval();
    EXPECT_EQ(parallel::convert_sync_batch_norm(*net, group), 1);
    EXPECT_EQ(net->ptr(0), net->ptr(2));
    EXPECT_FALSE(net->ptr(0)->is_training());
    EXPECT_NE(net->ptr(0)->as<parallel::SyncBatchNorm1d>(), nullptr);
  });
}

TEST(ConvertSyncBatchNormTest, ANormThatIsCalledByItsTypeIsRejectedAndNothingIsChanged) {
  test::run_ranks(1, "gloo", [](comm::Group& group) {
    const auto net = std::make_shared<NetImpl>();
    COHORT_EXPECT_THROW_WITH(parallel::convert_sync_batch_norm(*net, group), UsageError,
                             "block.bn is a torch::nn::BatchNorm1d that");
    COHORT_EXPECT_THROW_WITH(
        parallel::convert_sync_batch_norm(*net, group), UsageError,
        "Try: in that module parallel::SyncBatchNorm1d bn{nullptr}; and bn = register_module(\"bn\", "
        "parallel::SyncBatchNorm1d(4, group));");
    EXPECT_NE(net->parts->ptr(1)->as<nn::BatchNorm1d>(), nullptr);
    nn::BatchNorm1d norm(4);
    COHORT_EXPECT_THROW_WITH(parallel::convert_sync_batch_norm(*norm, group), UsageError,
                             "expected a module that holds norms");
    COHORT_EXPECT_THROW_WITH(parallel::convert_sync_batch_norm(*net, comm::Group()), UsageError,
                             "not in the group");
  });
}

}  // namespace
}  // namespace cohort

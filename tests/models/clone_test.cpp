#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <torch/utils.h>

#include "cohort/models/memory_format.h"
#include "cohort/models/registry.h"
#include "cohort/models/vgg.h"
#include "tests/models/helpers.h"

namespace cohort::models {
namespace {

ModelOptions small_options(const std::string& name) {
  ModelOptions options;
  options.name = name;
  options.num_classes = 5;
  options.image_size = 32;
  if (name.starts_with("vgg") || name.starts_with("resnet")) options.width = 0.0625;
  return options;
}

class CloneTest : public testing::TestWithParam<const char*> {};

TEST_P(CloneTest, CloneEqualsTheModelAndSharesNothing) {
  torch::nn::AnyModule model = make_model(small_options(GetParam()));
  const at::Tensor images = at::rand({2, 3, 32, 32});
  model.forward(images);  // moves the running statistics
  model.ptr()->eval();
  const at::NoGradGuard no_grad;
  const at::Tensor before = model.forward(images);
  torch::nn::AnyModule copy = model.clone();
  EXPECT_FALSE(copy.ptr()->is_training());
  EXPECT_TRUE(at::equal(copy.forward(images), before));

  const auto ours = model.ptr()->named_parameters();
  const auto theirs = copy.ptr()->named_parameters();
  ASSERT_EQ(ours.keys(), theirs.keys());
  ASSERT_EQ(model.ptr()->named_buffers().keys(), copy.ptr()->named_buffers().keys());
  for (const auto& item : ours) {
    EXPECT_NE(item.value().data_ptr(), theirs[item.key()].data_ptr()) << item.key();
    EXPECT_TRUE(theirs[item.key()].requires_grad());
  }
  // What forward computes with is what is registered, in both.
  for (at::Tensor& parameter : copy.ptr()->parameters()) parameter.zero_();
  EXPECT_EQ(copy.forward(images).abs().max().item<double>(), 0);
  EXPECT_TRUE(at::equal(model.forward(images), before));
  for (at::Tensor& parameter : model.ptr()->parameters()) parameter.zero_();
  EXPECT_EQ(model.forward(images).abs().max().item<double>(), 0);
}

TEST_P(CloneTest, CloningDrawsNoRandomNumber) {
  const torch::nn::AnyModule model = make_model(small_options(GetParam()));
  torch::manual_seed(3);
  const at::Tensor expected = at::rand({4});
  torch::manual_seed(3);
  model.clone();
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
}

INSTANTIATE_TEST_SUITE_P(Models, CloneTest,
                         testing::Values("vgg11", "vgg16_bn", "resnet18", "resnet50", "lenet5", "mlp"),
                         [](const auto& info) { return std::string(info.param); });

TEST(CloneTest, CloneOfAClone) {
  const auto model = std::make_shared<VGGImpl>(small_options("vgg11_bn"));
  const auto copy = std::dynamic_pointer_cast<VGGImpl>(model->clone()->clone());
  ASSERT_NE(copy, nullptr);
  model->eval();
  copy->eval();
  const at::Tensor images = at::rand({1, 3, 32, 32});
  EXPECT_TRUE(at::equal(model->forward(images), copy->forward(images)));
}

TEST(MemoryFormatTest, ChannelsLastKeepsValuesAndReachesTheFirstLayerOfGrayModels) {
  torch::nn::AnyModule model = make_model(quick_options());
  const auto module = model.ptr();
  module->eval();
  const at::NoGradGuard no_grad;
  const at::Tensor images = golden_images(1, 28);
  const at::Tensor before = model.forward(images);
  set_memory_format(*module, at::MemoryFormat::ChannelsLast);
  for (const auto& item : module->named_parameters()) {
    if (item.value().dim() != 4) continue;
    EXPECT_EQ(item.value().suggest_memory_format(), at::MemoryFormat::ChannelsLast) << item.key();
  }
  EXPECT_TRUE(at::allclose(model.forward(images), before, 1e-4, 1e-5));
  set_memory_format(*module, at::MemoryFormat::Contiguous);
  for (const at::Tensor& parameter : module->parameters()) EXPECT_TRUE(parameter.is_contiguous());
  EXPECT_TRUE(at::equal(model.forward(images), before));
}

}  // namespace
}  // namespace cohort::models

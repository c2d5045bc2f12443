#include <ATen/ops/rand.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/pooling.h>

#include "cohort/models/lenet.h"
#include "cohort/models/mlp.h"
#include "cohort/models/observer.h"
#include "cohort/models/registry.h"
#include "cohort/models/stack.h"
#include "tests/models/helpers.h"

namespace cohort::models {
namespace {

TEST(StackTest, HasSequentialsNames) {
  Stack stack;
  stack->add(torch::nn::Conv2d(1, 2, 3));
  stack->add(torch::nn::BatchNorm2d(2));
  const std::vector<std::string> expected{"0.weight", "0.bias", "1.weight", "1.bias"};
  EXPECT_EQ(stack->named_parameters().keys(), expected);
}

TEST(LeNet5Test, HasDocumentedNamesAndShapes) {
  ModelOptions options;
  options.name = "lenet5";
  options.num_classes = 10;
  options.in_channels = 1;
  for (const std::int64_t size : {12, 28, 31, 32, 64}) {
    options.image_size = size;
    LeNet5 model(options);
    EXPECT_EQ(model->forward(at::rand({2, 1, size, size})).sizes(), at::IntArrayRef({2, 10})) << size;
  }
  options.image_size = 28;
  LeNet5 model(options);
  const std::vector<std::string> expected{"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias",
                                          "fc1.weight",   "fc1.bias",   "fc2.weight",   "fc2.bias",
                                          "fc3.weight",   "fc3.bias"};
  EXPECT_EQ(model->named_parameters().keys(), expected);
  EXPECT_EQ(model->fc1->weight.sizes(), at::IntArrayRef({120, 400}));
  std::int64_t count = 0;
  for (const at::Tensor& parameter : model->parameters()) count += parameter.numel();
  EXPECT_EQ(count, 61706);  // as published
}

TEST(MlpTest, HasDocumentedNamesAndShapes) {
  ModelOptions options;
  options.name = "mlp";
  options.num_classes = 10;
  options.in_channels = 1;
  options.image_size = 28;
  options.extra["hidden"] = "30,20";
  MLP model(options);
  const std::vector<std::string> expected{"layers.0.weight", "layers.0.bias",   "layers.2.weight",
                                          "layers.2.bias",   "layers.4.weight", "layers.4.bias"};
  EXPECT_EQ(model->named_parameters().keys(), expected);
  EXPECT_EQ(model->forward(at::rand({3, 1, 28, 28})).sizes(), at::IntArrayRef({3, 10}));
  EXPECT_EQ(model->forward(at::rand({3, 784})).sizes(), at::IntArrayRef({3, 10}));
  options.extra.clear();
  EXPECT_EQ(MLP(options)->named_parameters()["layers.2.weight"].sizes(), at::IntArrayRef({512, 512}));
  options.extra["hidden"] = "";
  EXPECT_EQ(MLP(options)->parameters().size(), 2U);
}

TEST(ModelTest, TakesAnyImageSizeThatFitsGrayOrColour) {
  ModelOptions options;
  options.num_classes = 3;
  options.width = 0.0625;
  for (const char* name : {"vgg11", "vgg13_bn", "resnet18", "resnet50"}) {
    for (const std::int64_t channels : {1, 3}) {
      options.name = name;
      options.in_channels = channels;
      const torch::nn::AnyModule built = make_model(options);
      torch::nn::AnyModule model = built;
      for (const std::int64_t size : {32, 45, 64}) {
        EXPECT_EQ(model.forward(at::rand({2, channels, size, size + 3})).sizes(), at::IntArrayRef({2, 3}))
            << name;
      }
    }
  }
}

TEST(ModelTest, PoolsLeavesOutTheLastOnes) {
  ModelOptions options = quick_options();
  options.pools = 2;
  options.image_size = 4;
  torch::nn::AnyModule model = make_model(options);
  EXPECT_EQ(model.forward(at::rand({2, 1, 4, 4})).sizes(), at::IntArrayRef({2, 10}));
  std::size_t pools = 0;
  for (const auto& part : model.ptr()->modules()) pools += part->as<torch::nn::MaxPool2dImpl>() != nullptr;
  EXPECT_EQ(pools, 2U);
}

}  // namespace
}  // namespace cohort::models

// Our models as lists of layers, and cut into stages.
#include <torch/utils.h>

#include "cohort/base/error.h"
#include "cohort/models/layers.h"
#include "cohort/models/lenet.h"
#include "cohort/models/mlp.h"
#include "cohort/models/resnet.h"
#include "cohort/models/vgg.h"
#include "tests/pipeline/nets.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

using namespace test;

models::ModelOptions options_of(const char* name) {
  models::ModelOptions options;
  options.name = name;
  options.num_classes = 5;
  options.image_size = 32;
  options.width = 0.125;
  return options;
}

template <typename Model>
void expect_the_models_bits(const char* name, bool is_convolutional, const char* head = "default") {
  SCOPED_TRACE(name);
  auto of = options_of(name);
  if (!is_convolutional) of.width = 1;
  of.head = head;
  torch::manual_seed(1);
  Model model(of), twin(of);
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < model->parameters().size(); ++i)
      twin->parameters()[i].copy_(model->parameters()[i]);
  }
  const at::Tensor input = torch::randn({5, 3, 32, 32}), target = torch::randn({5, 5});
  plain_step([&](const at::Tensor& x) { return twin->forward(x); }, input, target, {3, 2});
  const Stage whole(models::layers_of(model.ptr()));
  const std::size_t half = whole.layers().size() / 2;
  PipelineOptions options;
  options.placements = placements(2);
  options.split_size = 3;
  for (const Schedule& schedule : {Schedule::kOneFOneB, Schedule::kZeroBubble}) {
    options.schedule = schedule;
    Pipeline pipe({whole.part(0, half), whole.part(half, whole.layers().size())}, options);
    EXPECT_EQ(pipe.parameters().size(), model->parameters().size());
    zero_grad(model->parameters());
    pipe.step(input, target, mse);
    Tensors got, expected;
    for (const at::Tensor& parameter : model->parameters()) got.push_back(parameter.grad());
    for (const at::Tensor& parameter : twin->parameters()) expected.push_back(parameter.grad());
    expect_same_bits(got, expected);
  }
}

TEST(ModelsTest, HaveTheirBitsAsListsOfLayers) {
  expect_the_models_bits<models::ResNet>("resnet18", true);
  expect_the_models_bits<models::VGG>("vgg11_bn", true, "linear");  // the other head has dropout
  expect_the_models_bits<models::MLP>("mlp", false);
}

TEST(ModelsTest, LayersHaveTheirNamesInTheModel) {
  const auto layers = models::layers_of(models::ResNet(options_of("resnet18")).ptr());
  EXPECT_EQ(layers.front().first, "conv1");
  EXPECT_EQ(layers[4].first, "layer1.0");
  EXPECT_EQ(layers.back().first, "fc");
  auto lenet = options_of("lenet5");
  lenet.width = 1;
  COHORT_EXPECT_THROW_WITH(models::layers_of(models::LeNet5(lenet).ptr()), UsageError,
                           "is not known as a list of layers");
}

}  // namespace
}  // namespace cohort::pipeline

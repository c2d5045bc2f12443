#include "cohort/models/layers.h"

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include "cohort/core/error.h"
#include "cohort/models/mlp.h"
#include "cohort/models/resnet.h"
#include "cohort/models/vgg.h"

namespace cohort::models {
namespace {

using Layers = std::vector<std::pair<std::string, core::AnyLayer>>;

core::AnyLayer flatten() {
  return torch::nn::Flatten(torch::nn::FlattenOptions().start_dim(1));
}

void add_stack(Layers& layers, const std::string& name, Stack stack) {
  for (std::size_t i = 0; i < stack->size(); ++i) {
    const std::string number = std::to_string(i);
    layers.emplace_back(name + "." + number, *stack->find_layer(number));
  }
}

Layers layers_of_resnet(ResNetImpl& model) {
  Layers layers{{"conv1", model.conv1}, {"bn1", model.bn1}, {"relu", model.relu}, {"maxpool", model.maxpool}};
  add_stack(layers, "layer1", model.layer1);
  add_stack(layers, "layer2", model.layer2);
  add_stack(layers, "layer3", model.layer3);
  add_stack(layers, "layer4", model.layer4);
  layers.emplace_back("avgpool", model.avgpool);
  layers.emplace_back("flatten", flatten());
  layers.emplace_back("fc", model.fc);
  return layers;
}

Layers layers_of_vgg(VGGImpl& model) {
  Layers layers;
  add_stack(layers, "features", model.features);
  const auto avgpool =
      std::dynamic_pointer_cast<torch::nn::AdaptiveAvgPool2dImpl>(model.named_children()["avgpool"]);
  layers.emplace_back("avgpool", torch::nn::AdaptiveAvgPool2d(avgpool));
  layers.emplace_back("flatten", flatten());
  add_stack(layers, "classifier", model.classifier);
  return layers;
}

Layers layers_of_mlp(MLPImpl& model) {
  Layers layers{{"flatten", flatten()}};
  add_stack(layers, "layers", model.layers);
  return layers;
}

}  // namespace

Layers layers_of(const std::shared_ptr<torch::nn::Module>& model) {
  if (auto* const resnet = dynamic_cast<ResNetImpl*>(model.get())) return layers_of_resnet(*resnet);
  if (auto* const vgg = dynamic_cast<VGGImpl*>(model.get())) return layers_of_vgg(*vgg);
  if (auto* const mlp = dynamic_cast<MLPImpl*>(model.get())) return layers_of_mlp(*mlp);
  throw UsageError("models.layers_of", core::concat(model->name(), " is not known as a list of layers"),
                   "a ResNet, a VGG, an MLP, or a torch::nn::Sequential, which is one");
}

}  // namespace cohort::models

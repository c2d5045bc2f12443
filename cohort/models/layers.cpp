#include "cohort/models/layers.h"

#include <torch/nn/modules/linear.h>

#include "cohort/base/error.h"

namespace cohort::models {

std::vector<core::NamedLayer> layers_of(const std::shared_ptr<torch::nn::Module>& model) {
  // A cross cast: Module and LayerList know nothing of each other.
  if (auto* const list = dynamic_cast<core::LayerList*>(model.get())) return list->named_layers();
  throw UsageError("models.layers_of", base::concat(model->name(), " is not known as a list of layers"),
                   "a ResNet, a VGG or an MLP, or a module of your own that is a core::LayerList "
                   "(core/any_layer.h)");
}

core::AnyLayer flatten_layer() {
  torch::nn::Flatten layer(torch::nn::FlattenOptions().start_dim(1));
  layer->eval();
  return layer;
}

void add_layers(std::vector<core::NamedLayer>& layers, const std::string& name, StackImpl& stack) {
  for (std::size_t i = 0; i < stack.size(); ++i) {
    const std::string number = std::to_string(i);
    layers.emplace_back(name + "." + number, *stack.find_layer(number));
  }
}

}  // namespace cohort::models

#include "cohort/models/stack.h"

#include <utility>

#include "cohort/models/observer.h"

namespace cohort::models {

void StackImpl::add(std::shared_ptr<torch::nn::Module> module, Forward forward) {
  register_module(std::to_string(layers_.size()), module);
  const bool leaf = module->children().empty();
  layers_.push_back({std::move(module), forward, leaf});
}

at::Tensor StackImpl::forward(const at::Tensor& input) {
  at::Tensor value = input;
  for (const Layer& layer : layers_) {
    at::Tensor output = layer.forward(*layer.module, value);
    const LayerObserver* observer = LayerObserver::current();
    if (observer != nullptr && layer.leaf) [[unlikely]] {
      observer->report(*layer.module, value, output);
    }
    value = std::move(output);
  }
  return value;
}

std::shared_ptr<torch::nn::Module> StackImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<StackImpl>();
  for (const Layer& layer : layers_) copy->add(layer.module->clone(device), layer.forward);
  if (!is_training()) copy->eval();
  return copy;
}

}  // namespace cohort::models

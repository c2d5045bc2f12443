#include "cohort/models/stack.h"

#include <utility>

#include "cohort/models/observer.h"

namespace cohort::models {

void StackImpl::add(core::AnyLayer layer) {
  register_module(std::to_string(layers_.size()), layer.ptr());
  layers_.push_back(std::move(layer));
}

core::AnyLayer* StackImpl::find_layer(const std::string& name) {
  for (std::size_t index = 0; index < layers_.size(); ++index) {
    if (name == std::to_string(index)) return &layers_[index];
  }
  return nullptr;
}

at::Tensor StackImpl::forward(const at::Tensor& input) {
  at::Tensor value = input;
  for (const core::AnyLayer& layer : layers_) {
    at::Tensor output = layer.forward(value);
    const LayerObserver* observer = LayerObserver::current();
    // A layer with children, such as a block, reports its own leaves.
    if (observer != nullptr && layer.ptr()->children().empty()) [[unlikely]] {
      observer->report(*layer.ptr(), value, output);
    }
    value = std::move(output);
  }
  return value;
}

std::shared_ptr<torch::nn::Module> StackImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<StackImpl>();
  for (const core::AnyLayer& layer : layers_) copy->add(layer.clone(device));
  // A new module is in training mode.
  if (!is_training()) copy->eval();
  return copy;
}

}  // namespace cohort::models

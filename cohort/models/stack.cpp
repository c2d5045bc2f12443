#include "cohort/models/stack.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/pooling.h>

#include <utility>

#include "cohort/models/observer.h"

namespace cohort::models {

void StackImpl::add(std::shared_ptr<torch::nn::Module> module, Forward forward) {
  const std::size_t index = layers_.size();
  register_module(std::to_string(index), module);
  order_.push_back(index);
  if (index > 0 && dynamic_cast<torch::nn::MaxPool2dImpl*>(module.get()) != nullptr &&
      dynamic_cast<torch::nn::ReLUImpl*>(layers_.back().module.get()) != nullptr) {
    std::swap(order_[index - 1], order_[index]);
  }
  const bool leaf = module->children().empty();
  layers_.push_back({std::move(module), forward, leaf});
}

at::Tensor StackImpl::forward(const at::Tensor& input) {
  // Whoever looks sees the layers in their order.
  if (!reorder_ || LayerObserver::current() != nullptr) [[unlikely]] {
    return forward_in_order(input);
  }
  at::Tensor value = input;
  for (const std::size_t index : order_) {
    const Layer& layer = layers_[index];
    value = layer.forward(*layer.module, value);
  }
  return value;
}

at::Tensor StackImpl::forward_in_order(const at::Tensor& input) {
  at::Tensor value = input;
  for (const Layer& layer : layers_) {
    at::Tensor output = layer.forward(*layer.module, value);
    const LayerObserver* observer = LayerObserver::current();
    if (observer != nullptr && layer.leaf) observer->report(*layer.module, value, output);
    value = std::move(output);
  }
  return value;
}

std::shared_ptr<torch::nn::Module> StackImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<StackImpl>();
  copy->reorder_ = reorder_;
  for (const Layer& layer : layers_) copy->add(layer.module->clone(device), layer.forward);
  if (!is_training()) copy->eval();
  return copy;
}

}  // namespace cohort::models

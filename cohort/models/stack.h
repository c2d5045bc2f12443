#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/core/any_layer.h"

namespace cohort::models {

/// Layers run one after the other, registered as "0", "1", ... like torch::nn::Sequential, whose parameter
/// names it shares. Differs from it in that a layer costs one call through a pointer (no boxed values) and
/// that every leaf layer is reported to a LayerObserver. Each layer takes and returns one tensor, and can
/// be replaced.
class StackImpl : public torch::nn::Cloneable<StackImpl>, public core::LayerHost {
 public:
  StackImpl() = default;

  /// Appends a layer. Its name is its number.
  void add(core::AnyLayer layer);

  /// Runs the layers in order, each on what the one before gave; without layers returns `input`.
  at::Tensor forward(const at::Tensor& input);
  /// How many layers there are.
  std::size_t size() const { return layers_.size(); }
  const std::shared_ptr<torch::nn::Module>& operator[](std::size_t index) const {
    return layers_[index].ptr();
  }

  core::AnyLayer* find_layer(const std::string& name) override;
  void reset() override {}
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

 private:
  std::vector<core::AnyLayer> layers_;
};
TORCH_MODULE(Stack);

}  // namespace cohort::models

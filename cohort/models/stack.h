#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::models {

/// Layers run one after the other, registered as "0", "1", ... like torch::nn::Sequential, whose parameter
/// names it shares. Differs from it in that a layer costs one call through a pointer (no boxed values) and
/// that every leaf layer is reported to a LayerObserver. Each layer takes and returns one tensor.
class StackImpl : public torch::nn::Cloneable<StackImpl> {
 public:
  StackImpl() = default;

  template <typename LayerImpl>
  void add(const torch::nn::ModuleHolder<LayerImpl>& layer) {
    add(layer.ptr(), [](torch::nn::Module& module, const at::Tensor& input) -> at::Tensor {
      return static_cast<LayerImpl&>(module).forward(input);
    });
  }

  at::Tensor forward(const at::Tensor& input);
  std::size_t size() const { return layers_.size(); }
  const std::shared_ptr<torch::nn::Module>& operator[](std::size_t index) const {
    return layers_[index].module;
  }

  void reset() override {}
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

 private:
  using Forward = at::Tensor (*)(torch::nn::Module&, const at::Tensor&);
  struct Layer {
    std::shared_ptr<torch::nn::Module> module;
    Forward forward;
    bool leaf;
  };

  void add(std::shared_ptr<torch::nn::Module> module, Forward forward);

  std::vector<Layer> layers_;
};
TORCH_MODULE(Stack);

}  // namespace cohort::models

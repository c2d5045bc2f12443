#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::models {

/// Layers run one after the other, registered as "0", "1", ... like torch::nn::Sequential, whose parameter
/// names it shares. Differs from it in that a layer costs one call through a pointer (no boxed values), every
/// leaf layer is reported to a LayerObserver, and a ReLU that feeds a max pool runs after the pool: max and
/// ReLU commute bit for bit, forward and backward, and the ReLU then sees a quarter of the values. Each layer
/// takes and returns one tensor.
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
  /// False runs the layers exactly in their order; the results are the same. For comparison.
  void set_reorder(bool reorder) { reorder_ = reorder; }

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
  at::Tensor forward_in_order(const at::Tensor& input);

  std::vector<Layer> layers_;
  std::vector<std::size_t> order_;
  bool reorder_ = true;
};
TORCH_MODULE(Stack);

}  // namespace cohort::models

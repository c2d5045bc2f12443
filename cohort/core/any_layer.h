#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// Layers that can be replaced by layers of another type, though LibTorch's forward() is not virtual:
///
///     struct BlockImpl : torch::nn::Module, core::LayerHost {
///       BlockImpl() : bn(torch::nn::BatchNorm2d(64)) { register_module("bn", bn.ptr()); }
///       at::Tensor forward(const at::Tensor& x) { return bn.forward(x); }
///       core::AnyLayer* find_layer(const std::string& name) override {
///         return name == "bn" ? &bn : nullptr;
///       }
///       core::AnyLayer bn;
///     };
namespace cohort::core {

/// A layer of one tensor to one tensor, of any type: a call is one through a pointer, where
/// torch::nn::AnyModule boxes its values. Ownership: shares the module; an empty one is made by default.
class AnyLayer {
 public:
  AnyLayer() = default;
  template <typename LayerImpl>
  AnyLayer(const torch::nn::ModuleHolder<LayerImpl>& layer)  // NOLINT: a layer is an AnyLayer
      : module_(layer.ptr()), forward_([](torch::nn::Module& module, const at::Tensor& input) -> at::Tensor {
          return static_cast<LayerImpl&>(module).forward(input);
        }) {}

  /// Runs the module's own forward(). There must be a module.
  at::Tensor forward(const at::Tensor& input) const { return forward_(*module_, input); }
  /// The module; null where this is empty.
  const std::shared_ptr<torch::nn::Module>& ptr() const { return module_; }
  explicit operator bool() const { return module_ != nullptr; }
  /// Returns a layer that holds a clone of the module.
  AnyLayer clone(const std::optional<torch::Device>& device = std::nullopt) const {
    AnyLayer copy = *this;
    copy.module_ = module_->clone(device);
    return copy;
  }

 private:
  using Forward = at::Tensor (*)(torch::nn::Module&, const at::Tensor&);
  std::shared_ptr<torch::nn::Module> module_;
  Forward forward_ = nullptr;
};

/// A module that keeps some of its children as AnyLayer, and calls them through it.
class LayerHost {
 public:
  /// Returns where the child that is registered as `name` is kept, or null where it is not kept so. Who puts
  /// another layer there registers it too, with replace_module().
  virtual AnyLayer* find_layer(const std::string& name) = 0;

 protected:
  ~LayerHost() = default;
};

/// A layer and its name in the model ("layer1.0").
using NamedLayer = std::pair<std::string, AnyLayer>;

/// A module whose forward is its layers, one after the other, so that it can be cut between any two of them.
class LayerList {
 public:
  /// Returns them in order. They share the module's submodules; what forward does besides, such as to check
  /// its input, they do not do.
  virtual std::vector<NamedLayer> named_layers() = 0;

 protected:
  ~LayerList() = default;
};

}  // namespace cohort::core

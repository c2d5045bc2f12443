#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/core/any_layer.h"
#include "cohort/core/random_scope.h"

/// A part of a model that runs on one placement.
namespace cohort::pipeline {

using Tensors = std::vector<at::Tensor>;

/// What one stage computes: layers, one after the other. Copies share them.
///
/// Between stages go one or more tensors, some of which may be undefined. A module takes them as the
/// arguments of its forward, and returns a tensor, a vector, or a tuple of two to four (or what an LSTM
/// returns); within a Sequential values go from layer to layer as LibTorch hands them.
class Stage {
 public:
  /// What a stage without modules computes.
  using Function = std::function<Tensors(const Tensors&)>;
  /// One layer: its values go in and out as LibTorch's AnyModule takes them.
  struct Layer {
    std::string name;                           ///< in the list, "3"; for messages and profiles
    std::shared_ptr<torch::nn::Module> module;  ///< null for a function
    /// Runs the layer on the values of the one before.
    std::function<torch::nn::AnyValue(std::span<torch::nn::AnyValue>)> forward;
  };

  /// The layers of a Sequential, which can be cut between any two of them.
  Stage(torch::nn::Sequential layers);  // NOLINT: a Sequential is a stage
  /// Layers of one tensor to one tensor, with their names.
  explicit Stage(const std::vector<core::NamedLayer>& layers);
  Stage(const core::AnyLayer& layer);  // NOLINT: a layer is a stage
  Stage(torch::nn::AnyModule module);  // NOLINT: a module is a stage
  template <typename Impl>
  Stage(const torch::nn::ModuleHolder<Impl>& module)  // NOLINT: a module is a stage
      : Stage(torch::nn::AnyModule(module.ptr())) {}
  /// A function, and the parameters and buffers that it uses. Threads: called on its placement's thread.
  Stage(Function function, Tensors parameters, Tensors buffers = {});

  /// A stage that another rank holds.
  static Stage remote();

  /// In messages; by default the type of its module.
  Stage& name(std::string name);
  /// Keeps the inputs of a micro-batch only, and runs the stage again in backward: autograd::recompute().
  Stage& recompute(bool recompute = true);

  /// As messages say it.
  const std::string& name() const { return name_; }
  /// Whether it computes on another rank.
  bool is_remote() const { return layers_.empty(); }
  /// Whether recompute() was asked for.
  bool recomputes() const { return recompute_; }
  /// Whether it is a list of layers, which part() takes from.
  bool is_list() const { return is_list_; }
  /// The layers, in order; none of one that is remote().
  const std::vector<Layer>& layers() const { return layers_; }
  /// Parameters of the layers, or of the function: one that is tied comes once for each use.
  Tensors parameters() const;
  /// Buffers, likewise.
  Tensors buffers() const;
  /// Moves the layers to a device. Throws: UsageError where a function's tensors are elsewhere, which cannot
  /// be moved from here.
  void to(c10::Device device);
  /// Layers [first, last) as a stage that shares them; of a list. Throws: UsageError.
  Stage part(std::size_t first, std::size_t last) const;

  /// Runs layers [first, last). With `random` each draws from its own generator: `random->layer` is the
  /// number of the stage's first layer in the whole model.
  Tensors forward(const Tensors& inputs, std::size_t first, std::size_t last,
                  const std::optional<core::RandomKey>& random = std::nullopt) const;

 private:
  Stage() = default;

  std::string name_;
  std::vector<Layer> layers_;
  Tensors parameters_, buffers_;  // of a function
  c10::Device device_ = c10::kCPU;
  bool is_list_ = false;
  bool recompute_ = false;
};

/// Returns the tensors in a value, in order. Throws: UsageError naming a type that is not understood.
Tensors tensors_of(torch::nn::AnyValue& value);

}  // namespace cohort::pipeline

#pragma once

#include <torch/nn/cloneable.h>

#include <memory>
#include <optional>

#include "cohort/core/generator_states.h"

/// The base of our models: clones are exact, and cloning has no side effect.
namespace cohort::models {

/// While one lives on this thread, models are being copied: LibTorch's CPU generator is restored at the end,
/// and models skip their own initialisation because the values are copied over it.
class CloneScope {
 public:
  CloneScope();
  ~CloneScope();
  CloneScope(const CloneScope&) = delete;
  CloneScope& operator=(const CloneScope&) = delete;
  /// True while this thread copies a model.
  static bool active();

 private:
  std::optional<core::GlobalGeneratorAsFound> generator_;  // of the outermost
};

/// torch::nn::Cloneable whose clone() draws no random number that the program sees. Derive, build every
/// submodule in reset(), and initialise there only unless CloneScope::active().
template <typename Derived>
class Model : public torch::nn::Cloneable<Derived> {
 public:
  using torch::nn::Cloneable<Derived>::Cloneable;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    const CloneScope scope;
    return torch::nn::Cloneable<Derived>::clone(device);
  }
};

}  // namespace cohort::models

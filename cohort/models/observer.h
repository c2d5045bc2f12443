#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>

#include "cohort/core/any_layer.h"

namespace torch::nn {
class AnyModule;
}

/// Sees every leaf layer of a model run: LibTorch's modules have no forward hooks, so our models report.
///
///     LayerObserver observer(*model, [](const std::string& name, const torch::nn::Module& layer,
///                                       const at::Tensor& input, const at::Tensor& output) { ... });
///     model->forward(images);
///
/// A model of your own reports by calling its layers through `observed(layer, input)`.
namespace cohort::models {

/// While it lives, the forward of `root`'s leaf layers on this thread calls `callback` with the layer's
/// qualified name ("features.3"), the layer, its input and its output. A layer that works in place (ReLU) has
/// written over the input by then. Layers outside `root` are not reported. Observers nest: the newest sees
/// the layers. Threads: the thread that made it. An exception of `callback` leaves through the model's
/// forward.
class LayerObserver {
 public:
  /// Told of each layer after it ran.
  using Callback = std::function<void(const std::string& name, const torch::nn::Module& layer,
                                      const at::Tensor& input, const at::Tensor& output)>;

  LayerObserver(const torch::nn::Module& root, Callback callback);
  ~LayerObserver();
  LayerObserver(const LayerObserver&) = delete;
  LayerObserver& operator=(const LayerObserver&) = delete;

  /// Returns this thread's observer, or null: all that a forward pays when nobody looks.
  static LayerObserver* current() noexcept;

  /// Calls the callback for `layer`; for use by forwards.
  void report(const torch::nn::Module& layer, const at::Tensor& input, const at::Tensor& output) const;

 private:
  std::unordered_map<const torch::nn::Module*, std::string> names_;
  Callback callback_;
  LayerObserver* previous_;
};

/// Returns layer.forward(input), reported to this thread's observer if there is one.
template <typename Layer>
at::Tensor observed(Layer& layer, const at::Tensor& input) {
  at::Tensor output = layer.forward(input);
  if (const LayerObserver* observer = LayerObserver::current()) [[unlikely]] {
    observer->report(layer, input, output);
  }
  return output;
}
/// The same for a layer whose type is not known here.
inline at::Tensor observed(core::AnyLayer& layer, const at::Tensor& input) {
  at::Tensor output = layer.forward(input);
  if (const LayerObserver* observer = LayerObserver::current()) [[unlikely]] {
    observer->report(*layer.ptr(), input, output);
  }
  return output;
}

/// Runs `model` once on `input`, without gradients and in the mode (training or evaluation) it is in, and
/// returns the qualified name of the first leaf layer whose output is not finite: "input" when the input
/// itself is not, "output" when only the result is not, nothing when all is finite. Buffers (running
/// statistics) and LibTorch's CPU generator are left as they were. A model that reports no layers gets
/// "output" at best.
std::optional<std::string> first_non_finite(torch::nn::AnyModule& model, const at::Tensor& input);

}  // namespace cohort::models

#include <ATen/ops/isfinite.h>
#include <torch/nn/modules/container/any.h>

#include <utility>
#include <vector>

#include "cohort/models/model.h"
#include "cohort/models/observer.h"

namespace cohort::models {
namespace {

bool finite(const at::Tensor& tensor) {
  return !tensor.is_floating_point() || at::isfinite(tensor).all().item<bool>();
}

/// Puts a module's buffers back when it dies.
class BufferGuard {
 public:
  explicit BufferGuard(const torch::nn::Module& module) {
    for (at::Tensor& buffer : module.buffers()) saved_.emplace_back(buffer, buffer.clone());
  }
  ~BufferGuard() {
    const at::NoGradGuard no_grad;
    // In place, as layers and replicas hold the buffer itself.
    for (auto& [buffer, value] : saved_) buffer.copy_(value);
  }
  BufferGuard(const BufferGuard&) = delete;
  BufferGuard& operator=(const BufferGuard&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> saved_;
};

}  // namespace

std::optional<std::string> first_non_finite(torch::nn::AnyModule& model, const at::Tensor& input) {
  if (!finite(input)) return "input";
  const at::NoGradGuard no_grad;
  const auto module = model.ptr();
  const BufferGuard buffers(*module);
  const CloneScope generator;  // puts the generator back, which dropout draws from
  std::optional<std::string> first;
  const LayerObserver observer(*module, [&first](const std::string& name, const torch::nn::Module&,
                                                 const at::Tensor&, const at::Tensor& output) {
    // Layers run in order: the first that is not finite is the cause, and later ones follow from it.
    if (!first && !finite(output)) first = name;
  });
  const at::Tensor output = model.forward(input);
  // Of a model that reports no layers, or one whose own code, between two layers, made the value.
  if (!first && !finite(output)) first = "output";
  return first;
}

}  // namespace cohort::models

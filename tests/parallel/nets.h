#pragma once

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <mutex>

#include "cohort/base/error.h"

namespace cohort::test {

// at::manual_seed is the process's: ranks that are threads make their models one after the other.
template <typename Make>
auto seeded(std::uint64_t seed, const Make& make) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  at::manual_seed(seed);
  return make();
}

// Layers one after the other; `last` can be left out of a forward.
struct StackImpl : torch::nn::Module {
  StackImpl(std::vector<std::int64_t> widths, at::ScalarType type) {
    for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
      layers.push_back(
          register_module(base::concat("layer", i), torch::nn::Linear(widths[i], widths[i + 1])));
    }
    to(type);
  }
  at::Tensor forward(at::Tensor x) { return forward_to(std::move(x), layers.size()); }
  at::Tensor forward_to(at::Tensor x, std::size_t end) {
    for (std::size_t i = 0; i < end; ++i) x = layers[i]->forward(x).tanh();
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Stack);

inline Stack make_stack(std::uint64_t seed = 1, std::vector<std::int64_t> widths = {5, 7, 6, 7, 3},
                        at::ScalarType type = at::kDouble) {
  return seeded(seed, [&] { return Stack(widths, type); });
}

inline at::Tensor wave(std::int64_t samples, std::int64_t features = 5, at::ScalarType type = at::kDouble) {
  return at::arange(samples * features, at::kDouble).view({samples, features}).sin().to(type);
}

// This rank's stretch of `whole`, as even as it can be.
inline at::Tensor share_of(const at::Tensor& whole, int rank, int size) {
  return at::tensor_split(whole, size)[static_cast<std::size_t>(rank)];
}

}  // namespace cohort::test

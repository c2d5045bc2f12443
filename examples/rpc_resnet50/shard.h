#pragma once

#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cohort/models/layers.h"
#include "cohort/models/resnet.h"
#include "cohort/rpc/rref.h"

constexpr std::int64_t kClasses = 1000;

/// The layers of ResNet-50 before layer3, or those from there on.
struct ShardImpl : torch::nn::Module {
  explicit ShardImpl(bool is_first) {
    cohort::models::ModelOptions options;
    options.name = "resnet50";
    options.num_classes = kClasses;
    bool is_here = is_first;
    for (const auto& [name, layer] : cohort::models::layers_of(cohort::models::ResNet(options).ptr())) {
      if (name == "layer3.0") is_here = !is_first;
      if (is_here) layers.push_back(layer);
    }
    for (std::size_t i = 0; i < layers.size(); ++i) register_module(std::to_string(i), layers[i].ptr());
  }
  at::Tensor run(at::Tensor x) {
    for (const cohort::core::AnyLayer& layer : layers) x = layer.forward(x);
    return x;
  }
  // Micro-batches come at the same time.
  at::Tensor forward(const cohort::rpc::RRef<at::Tensor>& input) {
    const at::Tensor x = input.to_here();
    const std::lock_guard lock(mutex);
    return run(x);
  }
  // Of batch norm: its running means and variances, and how many micro-batches they have seen.
  std::vector<at::Tensor> statistics() const { return buffers(); }
  std::vector<cohort::core::AnyLayer> layers;
  std::mutex mutex;
};

inline std::shared_ptr<ShardImpl> make_shard(bool is_first) {
  torch::manual_seed(1);
  return std::make_shared<ShardImpl>(is_first);
}

#pragma once

#include <ATen/Context.h>
#include <torch/nn/modules/container/any.h>

#include <string>

#include "cohort/models/registry.h"

namespace cohort::test {

/// A VGG for four classes of gray images of 16 x 16 that trains in milliseconds. Seeds the global generator.
inline torch::nn::AnyModule small_vgg(const std::string& name, const std::string& head = "linear") {
  at::manual_seed(4);
  models::ModelOptions options;
  options.name = name;
  options.num_classes = 4;
  options.in_channels = 1;
  options.width = 0.05;
  options.pools = 4;
  options.head = head;
  options.image_size = 16;
  return models::make_model(options);
}

}  // namespace cohort::test

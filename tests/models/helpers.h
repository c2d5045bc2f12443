#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <string>

#include "cohort/base/error.h"
#include "cohort/models/options.h"

namespace cohort::models {

/// The images of golden/make_golden.py.
inline at::Tensor golden_images(std::int64_t channels, std::int64_t size) {
  const at::Tensor index = at::arange(2 * channels * size * size, at::kLong);
  return (index.mul(7919).remainder(1000).to(at::kFloat) / 500 - 1).reshape({2, channels, size, size});
}

/// The model of the quick configuration.
inline ModelOptions quick_options(std::int64_t num_classes = 10) {
  ModelOptions options;
  options.name = "vgg11_bn";
  options.num_classes = num_classes;
  options.in_channels = 1;
  options.image_size = 28;
  options.width = 0.25;
  options.pools = 4;
  options.head = "linear";
  return options;
}

/// True if `text` contains `part`; for EXPECT_PRED2, which prints both.
inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Runs `call` and returns the message of the E that it throws.
template <typename E, typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace cohort::models

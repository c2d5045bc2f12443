#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "cohort/models/options.h"

/// What every model of ours checks before it computes.
namespace cohort::models {

/// Throws UsageError when a value is out of range, or when an option that is not in `used` (width, dropout,
/// pools, head, extra names) differs from its default.
void check_options(const ModelOptions& options, std::initializer_list<std::string_view> used);

/// Throws UsageError, naming the smallest, when options.image_size is below `smallest`.
void check_image_size(const ModelOptions& options, std::int64_t smallest);

/// Throws UsageError unless `input` is [batch, channels, height, width] with `channels` channels and at least
/// `smallest` pixels each way.
void check_images(const ModelOptions& options, const at::Tensor& input, std::int64_t smallest);

/// Returns `channels` times options.width, rounded, at least 1.
std::int64_t scaled(const ModelOptions& options, std::int64_t channels);

}  // namespace cohort::models

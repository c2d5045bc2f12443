#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "cohort/config/types.h"
#include "cohort/data/dataset.h"

/// What a model gets of a sample.
namespace cohort::train {

/// Returns what the model gets of a sample of `dataset`: the first field of one that a library registered, or
/// for Cohort's own what the keys under `data` make of it.
data::Field input_field(const config::DataConfig& config, bool channels_last, const data::Dataset& dataset);
/// Returns what the keys under `data` make of an image: [C, H, W] of data.color and data.image_size.
data::Field image_field(const config::DataConfig& config, bool channels_last);

/// Returns `samples` zeros of `field`, laid out as in a batch.
at::Tensor zero_batch(const data::Field& field, std::int64_t samples);

}  // namespace cohort::train

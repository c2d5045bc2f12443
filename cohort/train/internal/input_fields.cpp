#include "cohort/train/internal/input_fields.h"

#include <ATen/ops/zeros.h>

namespace cohort::train {

std::int64_t channels_of(const config::DataConfig& config) {
  return config.color == "gray" ? 1 : 3;
}

bool channels_last(const config::Config& config) {
  return config.train.memory_format == "channels_last";
}

data::Field image_field(const config::Config& config) {
  const std::int64_t side = config.data.image_size;
  return {.name = "input",
          .shape = {channels_of(config.data), side, side},
          .channels_last = channels_last(config)};
}

data::Field input_field(const config::Config& config, const data::Dataset& dataset) {
  if (data::is_own_dataset(config.data.type)) return image_field(config);
  return dataset.fields().at(0);
}

at::Tensor zero_batch(const data::Field& field, std::int64_t samples) {
  std::vector<std::int64_t> shape{samples};
  shape.insert(shape.end(), field.shape.begin(), field.shape.end());
  const bool last = field.channels_last && field.shape.size() == 3;
  return at::zeros(shape,
                   at::TensorOptions(field.dtype)
                       .memory_format(last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous));
}

}  // namespace cohort::train

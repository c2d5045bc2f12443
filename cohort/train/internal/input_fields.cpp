#include "cohort/train/internal/input_fields.h"

#include <ATen/ops/zeros.h>

namespace cohort::train {

data::Field image_field(const config::DataConfig& config, bool channels_last) {
  const std::int64_t side = config.image_size;
  return {
      .name = "input", .shape = {config::image_channels(config), side, side}, .channels_last = channels_last};
}

data::Field input_field(const config::DataConfig& config, bool channels_last, const data::Dataset& dataset) {
  if (data::is_own_dataset(config.type)) return image_field(config, channels_last);
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

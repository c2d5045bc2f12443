#include "cohort/models/memory_format.h"

#include <ATen/ops/as_strided.h>

namespace cohort::models {
namespace {

at::Tensor formatted(const at::Tensor& tensor, at::MemoryFormat format) {
  if (tensor.size(1) != 1) return tensor.contiguous(format);
  // With one channel both formats are the same bytes, and only the strides tell a convolution which it is.
  const std::int64_t height = tensor.size(2), width = tensor.size(3);
  const std::int64_t channel = format == at::MemoryFormat::ChannelsLast ? 1 : height * width;
  return tensor.contiguous().as_strided(tensor.sizes(), {height * width, channel, width, 1});
}

}  // namespace

void set_memory_format(torch::nn::Module& module, at::MemoryFormat format) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    // set_data() keeps the tensor object: optimizers and averages of gradients that hold it still hold the
    // parameter.
    if (parameter.dim() == 4) parameter.set_data(formatted(parameter.detach(), format));
  }
  for (at::Tensor& buffer : module.buffers()) {
    if (buffer.dim() == 4) buffer.set_data(formatted(buffer, format));
  }
}

}  // namespace cohort::models

#include "cohort/models/memory_format.h"

#include <ATen/ops/as_strided.h>

namespace cohort::models {
namespace {

at::Tensor formatted(const at::Tensor& tensor, at::MemoryFormat format) {
  const at::Tensor result = tensor.contiguous(format);
  if (format != at::MemoryFormat::ChannelsLast || result.size(1) != 1) return result;
  // With one channel both formats are the same bytes, and only the strides tell a convolution which it is.
  const std::int64_t height = result.size(2), width = result.size(3);
  return result.contiguous().as_strided(result.sizes(), {height * width, 1, width, 1});
}

}  // namespace

void set_memory_format(torch::nn::Module& module, at::MemoryFormat format) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    if (parameter.dim() == 4) parameter.set_data(formatted(parameter.detach(), format));
  }
  for (at::Tensor& buffer : module.buffers()) {
    if (buffer.dim() == 4) buffer.set_data(formatted(buffer, format));
  }
}

}  // namespace cohort::models

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

#include "cohort/data/internal/batch_buffer.h"

namespace cohort::data {

/// Copies buffers to an accelerator on a stream of its own, so that copies overlap with what the caller's
/// stream computes. Uses LibTorch's generic streams only; compiles and is never made without an accelerator.
class DeviceCopy {
 public:
  explicit DeviceCopy(at::Device device);

  struct Copy {
    std::vector<at::Tensor> fields;
    c10::Event ready;
  };
  /// Queues the copy of `fields`, which are views of `buffer`.
  Copy begin(const std::vector<at::Tensor>& fields, BatchBuffer& buffer);
  /// Makes the caller's stream wait for the copy; afterwards its tensors can be used on that stream.
  std::vector<at::Tensor> finish(Copy copy);

 private:
  at::Device device_;
  c10::Stream stream_;
};

}  // namespace cohort::data

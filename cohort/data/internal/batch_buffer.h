#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cohort/data/dataset.h"

namespace cohort::data {

/// Memory for one batch: a tensor per field.
struct BatchBuffer {
  std::vector<at::Tensor> tensors;
  std::vector<std::byte*> base;
  std::vector<std::int64_t> indices;
  /// Set once a copy to an accelerator was queued: the buffer may be written again when it has happened.
  std::optional<c10::Event> copied;
};

/// Buffers of one loader. A buffer comes back when its last owner lets go of it, on any thread.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  BufferPool(std::vector<Field> fields, std::int64_t batch_size, bool pinned);

  /// Returns a buffer that nobody uses: none of its tensors is held elsewhere, no copy from it is under way.
  std::shared_ptr<BatchBuffer> acquire();
  std::int64_t allocations() const;

 private:
  std::unique_ptr<BatchBuffer> allocate() const;

  const std::vector<Field> fields_;
  const std::int64_t batch_size_;
  const bool pinned_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<BatchBuffer>> free_;
  std::int64_t allocations_ = 0;
};

}  // namespace cohort::data

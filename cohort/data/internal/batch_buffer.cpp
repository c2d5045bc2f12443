#include "cohort/data/internal/batch_buffer.h"

#include <ATen/ops/empty.h>

namespace cohort::data {
namespace {

// Whether somebody kept a tensor of the buffer, or a view of one: their numbers must not change under them.
bool held_elsewhere(const BatchBuffer& buffer) {
  for (const at::Tensor& tensor : buffer.tensors) {
    if (tensor.use_count() > 1 || tensor.storage().use_count() > 1) return true;
  }
  return false;
}

}  // namespace

BufferPool::BufferPool(std::vector<Field> fields, std::int64_t batch_size, bool pinned)
    : fields_(std::move(fields)), batch_size_(batch_size), pinned_(pinned) {}

std::unique_ptr<BatchBuffer> BufferPool::allocate() const {
  auto buffer = std::make_unique<BatchBuffer>();
  for (const Field& field : fields_) {
    std::vector<std::int64_t> shape = field.shape;
    shape.insert(shape.begin(), batch_size_);
    const auto format = field.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    const auto options = at::TensorOptions().dtype(field.dtype).pinned_memory(pinned_);
    buffer->tensors.push_back(at::empty(shape, options, format));
    buffer->base.push_back(static_cast<std::byte*>(buffer->tensors.back().data_ptr()));
  }
  buffer->indices.resize(static_cast<std::size_t>(batch_size_));
  return buffer;
}

std::shared_ptr<BatchBuffer> BufferPool::acquire() {
  std::unique_ptr<BatchBuffer> buffer;
  {
    const std::lock_guard lock(mutex_);
    while (!free_.empty() && buffer == nullptr) {
      buffer = std::move(free_.back());
      free_.pop_back();
      if (held_elsewhere(*buffer)) buffer.reset();  // the tensor that was kept owns the memory now
    }
    if (buffer == nullptr) ++allocations_;
  }
  // Outside of the lock: page-locked memory takes a while to get.
  if (buffer == nullptr) buffer = allocate();
  // A copy to the accelerator may still be reading this memory.
  if (buffer->copied) buffer->copied->synchronize();
  // The deleter holds the pool, since a batch may outlive its loader.
  return {buffer.release(), [pool = shared_from_this()](BatchBuffer* returned) {
            const std::lock_guard lock(pool->mutex_);
            pool->free_.emplace_back(returned);
          }};
}

std::int64_t BufferPool::allocations() const {
  const std::lock_guard lock(mutex_);
  return allocations_;
}

}  // namespace cohort::data

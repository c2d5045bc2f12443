#include "cohort/data/slab.h"

#include <ATen/ops/empty.h>

namespace cohort::data {
namespace {

// Whether somebody kept a tensor of the slab, or a view of one: their numbers must not change under them.
bool held_elsewhere(const Slab& slab) {
  for (const at::Tensor& tensor : slab.tensors) {
    if (tensor.use_count() > 1 || tensor.storage().use_count() > 1) return true;
  }
  return false;
}

}  // namespace

SlabPool::SlabPool(std::vector<Field> fields, std::int64_t batch_size, bool pinned)
    : fields_(std::move(fields)), batch_size_(batch_size), pinned_(pinned) {}

std::unique_ptr<Slab> SlabPool::allocate() const {
  auto slab = std::make_unique<Slab>();
  for (const Field& field : fields_) {
    std::vector<std::int64_t> shape = field.shape;
    shape.insert(shape.begin(), batch_size_);
    const auto format = field.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    const auto options = at::TensorOptions().dtype(field.dtype).pinned_memory(pinned_);
    slab->tensors.push_back(at::empty(shape, options, format));
    slab->base.push_back(static_cast<std::byte*>(slab->tensors.back().data_ptr()));
  }
  slab->indices.resize(static_cast<std::size_t>(batch_size_));
  return slab;
}

std::shared_ptr<Slab> SlabPool::acquire() {
  std::unique_ptr<Slab> slab;
  {
    const std::lock_guard lock(mutex_);
    while (!free_.empty() && slab == nullptr) {
      slab = std::move(free_.back());
      free_.pop_back();
      if (held_elsewhere(*slab)) slab.reset();  // the tensor that was kept owns the memory now
    }
    if (slab == nullptr) ++allocations_;
  }
  if (slab == nullptr) slab = allocate();
  if (slab->copied) slab->copied->synchronize();
  return {slab.release(), [pool = shared_from_this()](Slab* returned) {
            const std::lock_guard lock(pool->mutex_);
            pool->free_.emplace_back(returned);
          }};
}

std::int64_t SlabPool::allocations() const {
  const std::lock_guard lock(mutex_);
  return allocations_;
}

}  // namespace cohort::data

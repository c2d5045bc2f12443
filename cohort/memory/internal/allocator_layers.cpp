// A chain of fixed places: arena, profiler, pool, and an end that holds LibTorch's first allocator. A
// place without a layer is passed over, so layers may come in any order. A block that has no owner of its
// own gets the deleter give_back(), which asks the layers in the order of the chain. Always: a block that
// no layer takes back goes to LibTorch's deleter.
#include "cohort/memory/internal/allocator_layers.h"

#include <c10/core/CPUAllocator.h>

#include <mutex>

namespace cohort::memory {

struct LayeredAllocator::All {
  LayeredAllocator end{nullptr};
  LayeredAllocator pool{&end}, profiler{&pool}, arena{&profiler};
  std::mutex mutex;  // who changes them

  LayeredAllocator& front() { return arena; }
  LayeredAllocator& at(Place place) {
    switch (place) {
      case Place::kArena:
        return arena;
      case Place::kProfiler:
        return profiler;
      case Place::kPool:
        break;
    }
    return pool;
  }
};

LayeredAllocator::All& LayeredAllocator::all() {
  static All& instance = *new All;  // leaked: blocks outlive statics
  return instance;
}

// The pool leaves way for an allocator that a user sets without a priority.
void LayeredAllocator::add(Place place, AllocatorLayer& layer) {
  All& self = all();
  const std::lock_guard lock(self.mutex);
  const bool is_first = self.end.original_ == nullptr;
  if (is_first) {
    self.end.original_ = c10::GetCPUAllocator();
    self.end.original_deleter_ = self.end.original_->raw_deleter();
  }
  // Requests read it without the mutex, so the layer has to be whole before they can see it.
  self.at(place).layer_.store(&layer, std::memory_order_release);
  // One that was set since then may end here itself.
  if (!is_first && c10::GetCPUAllocator() != &self.front()) return;
  c10::SetCPUAllocator(&self.front(), /*priority=*/place == Place::kPool ? 0 : 255);
}

bool LayeredAllocator::ends_at(const c10::Allocator* allocator) {
  All& self = all();
  const std::lock_guard lock(self.mutex);
  const c10::Allocator* const current = c10::GetCPUAllocator();
  return (current == &self.front() ? self.end.original_ : current) == allocator;
}

bool LayeredAllocator::is_current() {
  return c10::GetCPUAllocator() == &all().front();
}

LayeredAllocator& LayeredAllocator::after(Place place) {
  return *all().at(place).next_;
}

void LayeredAllocator::free(void* block) const {
  const LayeredAllocator* at = this;
  for (; at->next_ != nullptr; at = at->next_) {
    AllocatorLayer* const layer = at->layer_.load(std::memory_order_acquire);
    if (layer != nullptr && layer->take_back(block)) return;
  }
  at->original_deleter_(block);
}

void LayeredAllocator::give_back(void* block) {
  all().front().free(block);
}

void LayeredAllocator::copy_data(void* dest, const void* src, std::size_t count) const {
  all().end.original_->copy_data(dest, src, count);
}

}  // namespace cohort::memory

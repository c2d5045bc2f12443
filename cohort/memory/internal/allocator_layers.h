#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

/// One CPU allocator that stands before the one that was LibTorch's, with layers in a fixed order: what a
/// layer sees does not depend on which of them was used first in a process.
///
///     class Counting final : public memory::AllocatorLayer {
///      public:
///       static Counting& get() {
///         static Counting& instance = *new Counting;  // leaked: blocks outlive statics
///         return instance;
///       }
///       c10::DataPtr allocate(std::size_t bytes, memory::LayeredAllocator& next) override {
///         c10::DataPtr block = next.allocate(bytes);
///         if (block.get_deleter() == next.raw_deleter()) ++live;
///         return block;
///       }
///       bool take_back(void* /*block*/) override { return --live, false; }
///       std::atomic<int> live{0};
///
///      private:
///       Counting() { memory::LayeredAllocator::add(memory::LayeredAllocator::Place::kArena, *this); }
///     };
namespace cohort::memory {

class LayeredAllocator;

/// A layer is never destroyed: blocks come back at any time. Threads: any.
class AllocatorLayer {
 public:
  virtual ~AllocatorLayer() = default;
  /// Returns a block of its own, or what `next` gives. A block whose context is its own address has
  /// `next.raw_deleter()` for its deleter, unless it has an owner of its own.
  virtual c10::DataPtr allocate(std::size_t bytes, LayeredAllocator& next) = 0;
  /// Sees each block with that deleter, those from before the layer too. Returns whether it took the block
  /// back; else the next layers do.
  virtual bool take_back(void* block) = 0;
};

/// The layers from one place on, and then the allocator that was LibTorch's. LibTorch has the one from the
/// first place on. All blocks have one deleter, which asks the layers in their order. It stays for the life
/// of the process; who gives LibTorch another CPU allocator afterwards takes it out, with all its layers.
class LayeredAllocator final : public c10::Allocator {
 public:
  /// Who has a layer, in the order in which a request meets them: script's arenas, AllocationProfiler, the
  /// pool of tune_allocator().
  enum class Place : std::uint8_t { kArena, kProfiler, kPool };

  /// Has requests of LibTorch pass `layer`, the only one of its place.
  static void add(Place place, AllocatorLayer& layer);
  /// True if requests of LibTorch end at `allocator`, whatever layers they pass.
  static bool ends_at(const c10::Allocator* allocator);
  /// True if LibTorch's CPU allocator is this one. False before the first layer, and after LibTorch was given
  /// another one.
  static bool is_current();
  /// The layers after `place`.
  static LayeredAllocator& after(Place place);

  c10::DataPtr allocate(std::size_t bytes) override {
    LayeredAllocator* at = this;
    for (; at->next_ != nullptr; at = at->next_) {
      AllocatorLayer* const layer = at->layer_.load(std::memory_order_acquire);
      if (layer != nullptr) return layer->allocate(bytes, *at->next_);
    }
    c10::DataPtr block = at->original_->allocate(bytes);
    // Not one that has an owner of its own.
    static_cast<void>(block.compare_exchange_deleter(at->original_deleter_, &give_back));
    return block;
  }
  /// Takes a block back as the layers from here on do.
  void free(void* block) const;
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* dest, const void* src, std::size_t count) const override;

 private:
  struct All;
  explicit LayeredAllocator(LayeredAllocator* next) : next_(next) {}
  static All& all();
  static void give_back(void* block);

  LayeredAllocator* const next_;  // null: the end
  std::atomic<AllocatorLayer*> layer_{nullptr};
  c10::Allocator* original_ = nullptr;  // of the end, once there is a layer
  c10::DeleterFnPtr original_deleter_ = nullptr;
};

}  // namespace cohort::memory

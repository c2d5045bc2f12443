#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstddef>

namespace cohort::memory {

/// A CPU allocator that stands before the one that was LibTorch's. There is one of each kind in a process,
/// and it is never destroyed: blocks that it gave out come back to it at any time.
///
///     class Counting final : public memory::AllocatorFront<Counting> {
///      public:
///       Counting() : AllocatorFront(c10::GetCPUAllocator()) {}
///       c10::DataPtr allocate(std::size_t bytes) override {
///         c10::DataPtr block = behind().allocate(bytes);
///         if (adopt(block)) ++live;
///         return block;
///       }
///       bool take_back(void* /*block*/) { return --live, false; }
///       std::atomic<int> live{0};
///     };
///     c10::SetCPUAllocator(&Counting::get(), /*priority=*/255);
///
/// Threads: any.
template <typename Derived>
class AllocatorFront : public c10::Allocator {
 public:
  static Derived& get() {
    static Derived& instance = *new Derived;  // leaked: blocks outlive statics
    return instance;
  }

  c10::DeleterFnPtr raw_deleter() const final { return &give_back; }
  void copy_data(void* dest, const void* src, std::size_t count) const final {
    behind_.copy_data(dest, src, count);
  }

 protected:
  explicit AllocatorFront(c10::Allocator* behind) : behind_(*behind) {}

  c10::Allocator& behind() const { return behind_; }
  /// Has a block of the allocator behind come back here. False where it has an owner of its own.
  bool adopt(c10::DataPtr& block) const {
    return block.compare_exchange_deleter(behind_.raw_deleter(), &give_back);
  }
  /// The deleter of all blocks: `Derived::take_back(block)` says whether the block was its own; else the
  /// allocator behind gets it, as it does with blocks that were there before this one.
  static void give_back(void* block) {
    Derived& self = get();
    if (!self.take_back(block)) self.behind_.raw_deleter()(block);
  }

 private:
  c10::Allocator& behind_;
};

}  // namespace cohort::memory

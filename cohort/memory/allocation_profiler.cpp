// An allocator stands before LibTorch's own, and replaces the deleter of each block that it hands on. A table
// says how large a block is and which thread asked for it. Always: a block is taken off the count of the
// thread that asked for it, whichever thread frees it. A block that is not in the table was there before, and
// does not count. Once it is installed the allocator stays, since its blocks may come back at any time.
#include "cohort/memory/allocation_profiler.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>

#include "cohort/base/error.h"

namespace cohort::memory {
namespace {

struct LiveBlock {
  std::int64_t bytes;
  std::thread::id maker;
};

// What a watch counts.
struct Counts {
  struct Of {
    AllocationProfiler::Use use;
    std::vector<std::int64_t> curve;
  };

  void add(std::thread::id maker, std::int64_t bytes) {
    for (Of* of : {&total, &by_thread[maker]}) {
      of->use.now += bytes;
      of->use.peak = std::max(of->use.peak, of->use.now);
      of->curve.push_back(of->use.now);
    }
  }
  void begin() {
    const auto begin_anew = [](Of& of) {
      of.use.peak = of.use.now;
      of.curve.clear();
    };
    begin_anew(total);
    for (auto& [thread, of] : by_thread) begin_anew(of);
  }
  const Of& of(std::thread::id thread) const {
    static const Of kNone;
    const auto found = by_thread.find(thread);
    return found == by_thread.end() ? kNone : found->second;
  }

  Of total;
  std::map<std::thread::id, Of> by_thread;
  std::unordered_map<const void*, LiveBlock> blocks;
};

// Stands before the allocator that was there. Once it is LibTorch's it stays: blocks that it gave out come
// back to it whenever.
class WatchedAllocator final : public c10::Allocator {
 public:
  static WatchedAllocator& get() {
    static WatchedAllocator& instance = *new WatchedAllocator;  // leaked: blocks outlive statics
    return instance;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr block = base_->allocate(bytes);
    // As the base promises, the context is the block itself.
    const bool is_mine = block.compare_exchange_deleter(base_->raw_deleter(), &give_back);
    if (is_mine && block.get() != nullptr && is_watching_.load(std::memory_order_relaxed)) {
      const std::lock_guard lock(mutex);
      const auto maker = std::this_thread::get_id();
      counts.blocks.insert_or_assign(block.get(), LiveBlock{std::int64_t(bytes), maker});
      counts.add(maker, std::int64_t(bytes));
    }
    return block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    base_->copy_data(dest, src, count);
  }

  void watch(bool on) {
    const std::lock_guard lock(mutex);
    if (on && is_watching_) {
      throw UsageError("memory.allocation_profiler", "an AllocationProfiler lives already in this process",
                       "one for all placements: made_by(thread)");
    }
    counts = Counts();
    is_watching_ = on;
  }

  mutable std::mutex mutex;
  Counts counts;  // under mutex

 private:
  WatchedAllocator() : base_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, /*priority=*/255); }

  static void give_back(void* block) {
    WatchedAllocator& self = get();
    if (self.is_watching_.load(std::memory_order_relaxed)) {
      const std::lock_guard lock(self.mutex);
      const auto found = self.counts.blocks.find(block);
      if (found != self.counts.blocks.end()) {
        const LiveBlock known = found->second;
        self.counts.blocks.erase(found);
        self.counts.add(known.maker, -known.bytes);
      }
    }
    self.base_->raw_deleter()(block);
  }

  c10::Allocator* base_;
  std::atomic<bool> is_watching_ = false;
};

}  // namespace

AllocationProfiler::AllocationProfiler() {
  WatchedAllocator::get().watch(true);
}

AllocationProfiler::~AllocationProfiler() {
  WatchedAllocator::get().watch(false);
}

void AllocationProfiler::begin() {
  WatchedAllocator& allocator = WatchedAllocator::get();
  const std::lock_guard lock(allocator.mutex);
  allocator.counts.begin();
}

AllocationProfiler::Use AllocationProfiler::total() const {
  WatchedAllocator& allocator = WatchedAllocator::get();
  const std::lock_guard lock(allocator.mutex);
  return allocator.counts.total.use;
}

AllocationProfiler::Use AllocationProfiler::made_by(std::thread::id thread) const {
  WatchedAllocator& allocator = WatchedAllocator::get();
  const std::lock_guard lock(allocator.mutex);
  return allocator.counts.of(thread).use;
}

std::vector<std::int64_t> AllocationProfiler::curve() const {
  WatchedAllocator& allocator = WatchedAllocator::get();
  const std::lock_guard lock(allocator.mutex);
  return allocator.counts.total.curve;
}

std::vector<std::int64_t> AllocationProfiler::curve_of(std::thread::id thread) const {
  WatchedAllocator& allocator = WatchedAllocator::get();
  const std::lock_guard lock(allocator.mutex);
  return allocator.counts.of(thread).curve;
}

}  // namespace cohort::memory

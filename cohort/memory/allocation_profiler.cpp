// A layer before LibTorch's CPU allocator sees each block that is given out and taken back. A table says how
// large a block is and which thread asked for it. Always: a block is taken off the count of the thread that
// asked for it, whichever thread frees it. A block that is not in the table was there before, and does not
// count.
#include "cohort/memory/allocation_profiler.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>

#include "cohort/base/error.h"
#include "cohort/memory/internal/allocator_layers.h"

namespace cohort::memory {
namespace {

struct LiveBlock {
  std::int64_t bytes;
  std::thread::id maker;
};

// What a profiler counts. A curve has a point for each block that comes or leaves, so a peak between two
// points is not missed.
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

class ProfilerLayer final : public AllocatorLayer {
 public:
  static ProfilerLayer& get() {
    static ProfilerLayer& instance = *new ProfilerLayer;  // leaked: blocks outlive statics
    return instance;
  }

  c10::DataPtr allocate(std::size_t bytes, LayeredAllocator& next) override {
    c10::DataPtr block = next.allocate(bytes);
    // Others come back to an owner of their own.
    const bool comes_back = block.get_deleter() == next.raw_deleter();
    if (comes_back && block.get() != nullptr && is_watching_.load(std::memory_order_relaxed)) {
      const std::lock_guard lock(mutex);
      const auto maker = std::this_thread::get_id();
      counts.blocks.insert_or_assign(block.get(), LiveBlock{std::int64_t(bytes), maker});
      counts.add(maker, std::int64_t(bytes));
    }
    return block;
  }
  bool take_back(void* block) override {
    if (!is_watching_.load(std::memory_order_relaxed)) return false;
    const std::lock_guard lock(mutex);
    const auto found = counts.blocks.find(block);
    if (found == counts.blocks.end()) return false;
    const LiveBlock known = found->second;
    counts.blocks.erase(found);
    counts.add(known.maker, -known.bytes);
    // This layer only counts: the one that gave the block takes it.
    return false;
  }

  void set_watching(bool on) {
    const std::lock_guard lock(mutex);
    if (on && is_watching_) {
      throw UsageError("memory.allocation_profiler", "an AllocationProfiler lives already in this process",
                       "one for all placements: made_by(thread)");
    }
    counts = Counts();
    is_watching_ = on;
  }
  // Whether a block of LibTorch's comes through here. An allocator that LibTorch was given later may hand its
  // requests on.
  bool sees_blocks() {
    if (LayeredAllocator::is_current()) return true;
    c10::GetCPUAllocator()->allocate(64).clear();
    const std::lock_guard lock(mutex);
    const bool is_seen = !counts.of(std::this_thread::get_id()).curve.empty();
    counts.begin();
    return is_seen;
  }

  mutable std::mutex mutex;
  Counts counts;  // under mutex

 private:
  ProfilerLayer() { LayeredAllocator::add(LayeredAllocator::Place::kProfiler, *this); }

  std::atomic<bool> is_watching_ = false;
};

}  // namespace

AllocationProfiler::AllocationProfiler() {
  ProfilerLayer& layer = ProfilerLayer::get();
  layer.set_watching(true);
  if (layer.sees_blocks()) return;
  layer.set_watching(false);
  throw UsageError("memory.allocation_profiler",
                   "no block can be counted: LibTorch was given another CPU allocator after Cohort's",
                   "c10::SetCPUAllocator before tune_allocator() and the first AllocationProfiler");
}

AllocationProfiler::~AllocationProfiler() {
  ProfilerLayer::get().set_watching(false);
}

void AllocationProfiler::begin() {
  ProfilerLayer& layer = ProfilerLayer::get();
  const std::lock_guard lock(layer.mutex);
  layer.counts.begin();
}

AllocationProfiler::Use AllocationProfiler::total() const {
  ProfilerLayer& layer = ProfilerLayer::get();
  const std::lock_guard lock(layer.mutex);
  return layer.counts.total.use;
}

AllocationProfiler::Use AllocationProfiler::made_by(std::thread::id thread) const {
  ProfilerLayer& layer = ProfilerLayer::get();
  const std::lock_guard lock(layer.mutex);
  return layer.counts.of(thread).use;
}

std::vector<std::int64_t> AllocationProfiler::curve() const {
  ProfilerLayer& layer = ProfilerLayer::get();
  const std::lock_guard lock(layer.mutex);
  return layer.counts.total.curve;
}

std::vector<std::int64_t> AllocationProfiler::curve_of(std::thread::id thread) const {
  ProfilerLayer& layer = ProfilerLayer::get();
  const std::lock_guard lock(layer.mutex);
  return layer.counts.of(thread).curve;
}

}  // namespace cohort::memory

#pragma once

#include <cstdint>
#include <thread>
#include <vector>

/// What LibTorch's CPU tensors take, on all threads.
namespace cohort::memory {

/// Counts every block that LibTorch's CPU allocator gives out while it lives, and takes back, on whichever
/// thread: tensors, and the work space of kernels. Blocks that were there before do not count, nor what other
/// allocators hold (memory shared between ranks, pinned memory, LibTorch's own objects).
///
///     const AllocationProfiler profiler;
///     ... make the model ...
///     const auto model_bytes = profiler.total().now;
///
/// Units: bytes, as they were asked for. Costs a lock and a table entry per block. Threads: any.
/// Throws: UsageError where one lives already in this process, or where LibTorch was given a CPU allocator
/// that does not ask Cohort's (tune_allocator(), an earlier AllocationProfiler).
class AllocationProfiler {
 public:
  /// Bytes of the blocks that are counted.
  struct Use {
    std::int64_t now = 0;   ///< not given back yet
    std::int64_t peak = 0;  ///< most since the last begin()
  };

  AllocationProfiler();
  ~AllocationProfiler();
  AllocationProfiler(const AllocationProfiler&) = delete;
  AllocationProfiler& operator=(const AllocationProfiler&) = delete;

  /// Peaks and the curve begin anew, from what there is now.
  void begin();
  /// Of blocks that any thread asked for.
  Use total() const;
  /// Of blocks that this thread asked for, whoever gives them back.
  Use made_by(std::thread::id thread) const;
  /// What there was in all after each block that was given out or taken back since begin().
  std::vector<std::int64_t> curve() const;
  /// The same of blocks that this thread asked for.
  std::vector<std::int64_t> curve_of(std::thread::id thread) const;
};

}  // namespace cohort::memory

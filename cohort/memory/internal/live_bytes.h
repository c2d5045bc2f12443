#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace cohort::memory {

/// Counts the bytes of tensors that this thread makes and drops while it lives: below 0 where it drops what
/// was there before.
class LiveBytes {
 public:
  LiveBytes() : counter_(std::make_shared<Counter>()), guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}
  /// Bytes that this thread has made and not dropped since the start.
  std::int64_t now() const { return counter_->now; }
  /// The most that now() was; 0 at least.
  std::int64_t peak() const { return counter_->peak; }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* /*ptr*/, std::int64_t size, std::size_t /*allocated*/,
                           std::size_t /*reserved*/, c10::Device /*device*/) override {
      now += size;
      peak = std::max(peak, now);
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::int64_t now = 0, peak = 0;
  };
  const std::shared_ptr<Counter> counter_;
  const c10::DebugInfoGuard guard_;
};

}  // namespace cohort::memory

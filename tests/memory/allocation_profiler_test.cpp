#include "cohort/memory/allocation_profiler.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::memory {
namespace {

TEST(AllocationProfilerTest, CountsWhatIsGivenOutAndTakenBackOnAnyThread) {
  at::Tensor before = at::empty({100});
  const AllocationProfiler profiler;
  at::Tensor of_this_thread = at::empty({10});
  at::Tensor theirs;
  std::thread::id other;
  std::thread([&] {
    other = std::this_thread::get_id();
    theirs = at::empty({1000});
  }).join();
  EXPECT_EQ(profiler.total().now, 4040);
  EXPECT_EQ(profiler.made_by(std::this_thread::get_id()).now, 40);
  EXPECT_EQ(profiler.made_by(other).now, 4000);
  before.reset();  // was there before
  theirs.reset();  // on another thread than it was made on
  EXPECT_EQ(profiler.total().now, 40);
  EXPECT_EQ(profiler.made_by(other).now, 0);
  EXPECT_EQ(profiler.made_by(other).peak, 4000);
  EXPECT_EQ(profiler.total().peak, 4040);
  EXPECT_EQ(profiler.curve(), (std::vector<std::int64_t>{40, 4040, 40}));
  EXPECT_EQ(profiler.curve_of(other), (std::vector<std::int64_t>{4000, 0}));
}

TEST(AllocationProfilerTest, PeaksAndTheCurveBeginAnew) {
  AllocationProfiler profiler;
  at::Tensor kept = at::empty({10});
  at::empty({100});
  profiler.begin();
  EXPECT_EQ(profiler.total().peak, 40);
  EXPECT_TRUE(profiler.curve().empty());
  at::empty({5});
  EXPECT_EQ(profiler.total().peak, 60);
  EXPECT_EQ(profiler.curve(), (std::vector<std::int64_t>{60, 40}));
}

TEST(AllocationProfilerTest, BlocksMayOutliveTheirProfilerAndOneProfilerTheNext) {
  at::Tensor kept;
  {
    const AllocationProfiler profiler;
    kept = at::empty({10});
  }
  const AllocationProfiler profiler;
  kept.reset();
  EXPECT_EQ(profiler.total().now, 0);
  const at::Tensor more = at::empty({3});
  EXPECT_EQ(profiler.total().now, 12);
}

TEST(AllocationProfilerTest, ASecondOneIsRejected) {
  const AllocationProfiler profiler;
  COHORT_EXPECT_THROW_WITH(AllocationProfiler(), UsageError, "an AllocationProfiler lives already");
}

// What a program gives LibTorch after Cohort's allocator, until the end of the scope.
class LaterAllocator final : public c10::Allocator {
 public:
  explicit LaterAllocator(c10::Allocator& next) : next_(next) {
    c10::SetCPUAllocator(this, /*priority=*/255);
  }
  ~LaterAllocator() override { c10::SetCPUAllocator(current_, /*priority=*/255); }
  c10::DataPtr allocate(std::size_t bytes) override { return next_.allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return next_.raw_deleter(); }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    next_.copy_data(dest, src, count);
  }

 private:
  c10::Allocator* const current_ = c10::GetCPUAllocator();
  c10::Allocator& next_;
};

TEST(AllocationProfilerTest, AnAllocatorThatBypassesTheProfilerIsAnErrorInsteadOfZeroBytes) {
  { const AllocationProfiler first; }
  {
    const LaterAllocator own(*c10::GetDefaultCPUAllocator());
    COHORT_EXPECT_THROW_WITH(AllocationProfiler(), UsageError, "no block can be counted");
  }
  const AllocationProfiler profiler;  // the one that was rejected is no second one
  const at::Tensor kept = at::empty({10});
  EXPECT_EQ(profiler.total().now, 40);
}

TEST(AllocationProfilerTest, AnAllocatorThatHandsRequestsOnToTheProfilerIsCounted) {
  { const AllocationProfiler first; }
  const LaterAllocator own(*c10::GetCPUAllocator());
  const AllocationProfiler profiler;
  EXPECT_TRUE(profiler.curve().empty());
  const at::Tensor kept = at::empty({10});
  EXPECT_EQ(profiler.total().now, 40);
  EXPECT_EQ(profiler.total().peak, 40);
}

}  // namespace
}  // namespace cohort::memory

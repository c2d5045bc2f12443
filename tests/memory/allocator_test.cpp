#include "cohort/memory/allocator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/memory/allocation_profiler.h"
#include "cohort/memory/internal/live_bytes.h"
#include "tests/support/environment.h"
#include "tests/support/throws.h"

namespace cohort::memory {
namespace {

using test::ScopedEnv;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kOtherMalloc = true;
#else
constexpr bool kOtherMalloc = false;
#endif

TEST(AllocatorTest, UserMayKeepTheSystemsBehaviour) {
  {
    const ScopedEnv env("COHORT_ALLOCATOR", "system");
    EXPECT_FALSE(tune_allocator());
  }
  const ScopedEnv env("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072");
  EXPECT_FALSE(tune_allocator());
}

TEST(AllocatorTest, RejectsAnUnknownChoice) {
  const ScopedEnv env("COHORT_ALLOCATOR", "fast");
  COHORT_EXPECT_THROW_WITH(tune_allocator(), ConfigError,
                           "COHORT_ALLOCATOR: got \"fast\", expected one of tuned");
}

TEST(AllocatorTest, LargeBlocksStayWithTheProcess) {
  const ScopedEnv choice("COHORT_ALLOCATOR", std::nullopt);
  const ScopedEnv tunables("GLIBC_TUNABLES", std::nullopt);
  if (kOtherMalloc) {
    EXPECT_FALSE(tune_allocator());
    return;
  }
  ASSERT_TRUE(tune_allocator());
  const std::size_t bytes = 16 << 20;
  const std::size_t mapped = mallinfo2().hblks;
  void* block = std::malloc(bytes);
  ASSERT_NE(block, nullptr);
  std::memset(block, 1, bytes);
  EXPECT_EQ(mallinfo2().hblks, mapped) << "the block has a mapping of its own, which free() gives back";
  std::free(block);
  EXPECT_GE(mallinfo2().fordblks, bytes) << "the block went back to the system";
}

long page_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_minflt;
}

// A block above 64 MiB on a thread that is not the first: malloc would map it anew each time.
void expect_tuned_tensors() {
  const ScopedEnv choice("COHORT_ALLOCATOR", std::nullopt);
  const ScopedEnv tunables("GLIBC_TUNABLES", std::nullopt);
  ASSERT_EQ(tune_allocator(), !kOtherMalloc);
  if (kOtherMalloc) return;
  at::ones({40 << 20});
  const void* there = nullptr;
  std::thread([&] {
    const long before = page_faults();
    const at::Tensor again = at::ones({40 << 20});
    there = again.data_ptr();
    EXPECT_LT(page_faults() - before, 200) << "160 MiB are 40,960 pages";
  }).join();
  EXPECT_EQ(at::empty({40 << 20}).data_ptr(), there);
}

TEST(AllocatorTest, LargeTensorsKeepTheirPagesOnAnyThread) {
  expect_tuned_tensors();
}

TEST(AllocatorTest, LargeTensorsKeepTheirPagesWhereAProfilerCameFirst) {
  { const AllocationProfiler profiler; }
  expect_tuned_tensors();
}

TEST(AllocatorTest, TensorsOfThePoolAreCountedAsOthersAre) {
  const ScopedEnv choice("COHORT_ALLOCATOR", std::nullopt);
  const ScopedEnv tunables("GLIBC_TUNABLES", std::nullopt);
  at::Tensor before = at::empty({2 << 20});
  tune_allocator();
  {
    const LiveBytes live;
    const at::Tensor large = at::empty({1 << 20}), small = at::empty({100});
    EXPECT_EQ(live.now(), (4 << 20) + 400);
  }
  const AllocationProfiler profiler;
  const at::Tensor large = at::empty({1 << 20});
  before.reset();  // of the allocator that was there before
  EXPECT_EQ(profiler.total().now, 4 << 20);
}

}  // namespace
}  // namespace cohort::memory

#include "cohort/core/allocator.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdlib>
#include <cstring>

#include "cohort/core/error.h"
#include "tests/support/environment.h"
#include "tests/support/throws.h"

namespace cohort::core {
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

TEST(AllocatorTest, RefusesAnUnknownChoice) {
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

}  // namespace
}  // namespace cohort::core

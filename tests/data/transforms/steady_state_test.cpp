#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>

#include "../codecs/golden.h"
#include "cohort/data/codecs/internal/arena.h"
#include "cohort/data/transforms/transform_pipeline.h"

// Counts what the whole process asks the C library for, libjpeg's and libpng's calls too. Not under
// sanitizers, which bring their own malloc.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COHORT_OTHER_MALLOC
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define COHORT_OTHER_MALLOC
#endif
#endif

#if defined(__GLIBC__) && !defined(COHORT_OTHER_MALLOC)
namespace {
std::atomic<int64_t> allocations{0};
}
extern "C" {
void* __libc_malloc(size_t);
void* __libc_memalign(size_t, size_t);
void* malloc(size_t size) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(size);
}
void* aligned_alloc(size_t alignment, size_t size) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_memalign(alignment, size);
}
}

namespace cohort::data {
namespace {

TEST(SteadyStateTest, NothingIsAllocatedForAnImage) {
  const TransformPipeline pipeline({random_resized_crop(16), random_horizontal_flip(), to_tensor()});
  std::vector<float> out(3 * 16 * 16);
  for (const char* name : {"jpeg_420.file", "jpeg_420_progressive.file", "jpeg_cmyk.file", "jpeg_grey.file",
                           "png_palette.file", "png_interlaced.file", "png_rgb16.file"}) {
    const std::vector<std::byte> file = golden_bytes(name);
    const std::string label = name;
    const auto epoch = [&] {
      for (uint64_t i = 0; i < 100; ++i) {
        base::RandomStream random(1, 0, i, base::Purpose::kTransform);
        pipeline.run_encoded(file, label, random, out.data(), Layout::kChannelsLast);
      }
    };
    epoch();
    const int64_t before = allocations.load();
    epoch();
    EXPECT_EQ(allocations.load() - before, 0) << name;
  }
  EXPECT_GT(allocations.load(), 0);  // or nothing was counted
}

}  // namespace
}  // namespace cohort::data
#endif

namespace cohort::data {
namespace {

TEST(ArenaTest, HandsOutTheSameMemoryAgain) {
  Arena arena;
  void* first = arena.allocate(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % Arena::kAlignment, 0u);
  arena.allocate(1 << 20);
  arena.reset();
  void* merged = arena.allocate(100);  // one block now, large enough for all
  EXPECT_EQ(static_cast<char*>(arena.allocate(1 << 20)), static_cast<char*>(merged) + 128);
  arena.reset();
  EXPECT_EQ(arena.allocate(1), merged);
}

}  // namespace
}  // namespace cohort::data

#include "cohort/comm/backends/shm/internal/arena.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

namespace cohort::comm::shm {
namespace {

TEST(ArenaTest, MemoryIsFoundUsedAgainAndJoined) {
  void* const a = arena_allocate(1000);
  void* const b = arena_allocate(1000);
  ASSERT_NE(a, b);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % 64, 0U);
  const auto place = arena_find(static_cast<char*>(b) + 10, 100);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->offset, arena_find(b, 1)->offset + 10);
  int on_the_stack = 0;
  EXPECT_FALSE(arena_find(&on_the_stack, 4));
  arena_free(a);
  arena_free(b);
  void* const both = arena_allocate(2048);  // only fits where the two were if they were joined
  EXPECT_EQ(both, a);
  arena_free(both);
  void* const large = arena_allocate(std::size_t{80} << 20);
  EXPECT_NE(arena_find(large, 1)->arena, place->arena);
  arena_free(large);
  EXPECT_EQ(arena_allocate(std::size_t{70} << 20), large);
  arena_free(large);
}

// 64 ranks of a small model do not take gigabytes.
TEST(ArenaTest, TheFirstTensorsTakeLittleMemory) {
  void* const small = arena_allocate(1000);
  const auto place = arena_find(small, 1);
  ASSERT_TRUE(place);
  struct stat status {};
  ASSERT_EQ(::fstat(arena_fd(place->arena), &status), 0);
  EXPECT_LE(status.st_size, 4 << 20);
  EXPECT_LE(status.st_blocks * 512, 4 << 20);
  arena_free(small);
}

}  // namespace
}  // namespace cohort::comm::shm

#include "cohort/comm/shm/arena.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace cohort::comm::shm

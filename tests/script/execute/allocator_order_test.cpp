// What an AllocationProfiler reports while script mode logs blocks and serves them from an arena, whichever
// of the three layers before LibTorch's CPU allocator came first. Each case is a process of its own.
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "cohort/memory/allocation_profiler.h"
#include "cohort/memory/allocator.h"
#include "cohort/script/internal/execute/arena.h"

namespace cohort::script {
namespace {

void use_profiler() {
  const memory::AllocationProfiler profiler;
}

void use_arena() {
  AllocationLog log;
  const MemoryScope scope(&log);
}

void use_pool() {
  memory::tune_allocator();
}

void expect_the_same_report() {
  const memory::AllocationProfiler profiler;
  AllocationLog log;
  at::Tensor logged;
  {
    const MemoryScope scope(&log);
    logged = at::empty({100});
    at::empty({1 << 19});  // of the pool
    void* const raw = c10::GetCPUAllocator()->raw_allocate(64);
    c10::GetCPUAllocator()->raw_deallocate(raw);
  }
  {
    const auto arena = c10::make_intrusive<Arena>(1024);
    ArenaSource source(arena.get());
    const std::array<PlannedBlock, 2> blocks = {PlannedBlock{.bytes = 256, .offset = 0},
                                                PlannedBlock{.bytes = 40}};
    source.expect(blocks);
    const MemoryScope scope(&source);
    const at::Tensor planned = at::empty({64}), elsewhere = at::empty({10});
    EXPECT_TRUE(arena->begins(planned.const_data_ptr(), 0));
  }
  logged.reset();
  const std::vector<std::int64_t> expected = {400,  400 + (2 << 20), 400,  464, 400,
                                              1488, 1488 + 40,       1488, 400, 0};
  EXPECT_EQ(profiler.curve(), expected);
  std::size_t num_died = 0;
  for (const AllocationLog::Allocation& entry : log.entries())
    num_died += entry.died != AllocationLog::kNever;
  EXPECT_EQ(num_died, 3);
}

TEST(AllocatorOrderTest, PoolThenProfilerThenArena) {
  use_pool();
  use_profiler();
  use_arena();
  expect_the_same_report();
}

TEST(AllocatorOrderTest, PoolThenArenaThenProfiler) {
  use_pool();
  use_arena();
  use_profiler();
  expect_the_same_report();
}

TEST(AllocatorOrderTest, ProfilerThenArenaThenPool) {
  use_profiler();
  use_arena();
  use_pool();
  expect_the_same_report();
}

TEST(AllocatorOrderTest, ArenaThenProfilerThenPool) {
  use_arena();
  use_profiler();
  use_pool();
  expect_the_same_report();
}

}  // namespace
}  // namespace cohort::script

#include "cohort/memory/process_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

namespace cohort::memory {
namespace {

TEST(MemoryTest, TouchedPagesShowInResidentAndProportionalMemory) {
  const ProcessMemory before = process_memory();
  ASSERT_GT(before.rss_bytes, 0);
  // Another process of this program that starts meanwhile takes its share of a few MiB, pages of files.
  const std::size_t bytes = 256 << 20;
  void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  std::memset(pages, 1, bytes);
  const ProcessMemory during = process_memory();
  ::munmap(pages, bytes);
  const auto most = static_cast<std::int64_t>(bytes) * 9 / 10;
  EXPECT_GE(during.rss_bytes - before.rss_bytes, most);
  EXPECT_GE(during.pss_bytes - before.pss_bytes, most);
  EXPECT_GE(during.peak_rss_bytes, during.rss_bytes * 9 / 10);
  const ProcessMemory after = process_memory();
  EXPECT_LT(after.rss_bytes, during.rss_bytes - most / 2);
  EXPECT_GE(after.peak_rss_bytes, during.rss_bytes * 9 / 10) << "the peak stays";
}

TEST(MemoryTest, SharedPagesCountByTheirShare) {
  const ProcessMemory memory = process_memory();
  EXPECT_LE(memory.pss_bytes, memory.rss_bytes + (4 << 20));
  EXPECT_GT(memory.pss_bytes, 0);
}

TEST(MemoryTest, SystemHasMoreMemoryThanIsAvailable) {
  const SystemMemory memory = system_memory();
  EXPECT_GT(memory.available_bytes, 0);
  EXPECT_GE(memory.total_bytes, memory.available_bytes);
}

}  // namespace
}  // namespace cohort::memory

#include "cohort/memory/internal/block_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace cohort::memory {
namespace {

constexpr std::size_t kMiB = 1 << 20;
constexpr std::size_t kPage = 4096;

std::size_t pages_of(const void* block, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(block) / kPage * kPage;
  std::vector<unsigned char> there((bytes + kPage) / kPage);
  EXPECT_EQ(::mincore(reinterpret_cast<void*>(begin), bytes, there.data()), 0);
  return static_cast<std::size_t>(
      std::count_if(there.begin(), there.end(), [](unsigned char byte) { return byte & 1; }));
}

TEST(BlockPoolTest, GivesTheSameMemoryAgainWithItsPagesOnAnotherThread) {
  BlockPool pool(256 * kMiB);
  void* const first = pool.allocate(100 * kMiB);
  std::memset(first, 1, 100 * kMiB);
  pool.free(first);
  void* second = nullptr;
  std::thread([&] { second = pool.allocate(100 * kMiB); }).join();
  EXPECT_EQ(second, first);
  EXPECT_EQ(pages_of(second, 100 * kMiB), 100 * kMiB / kPage);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(second) % 64, 0U);
  pool.free(second);
  EXPECT_EQ(pool.use().live, 0U);
}

TEST(BlockPoolTest, NeighboursThatAreFreeBecomeOneBlock) {
  BlockPool pool(64 * kMiB);
  std::vector<void*> blocks;
  for (int i = 0; i < 7; ++i) blocks.push_back(pool.allocate(8 * kMiB));
  for (const int i : {1, 3, 2}) pool.free(blocks[static_cast<std::size_t>(i)]);
  EXPECT_EQ(pool.allocate(24 * kMiB), blocks[1]) << "three of 8 MiB side by side hold one of 24";
  EXPECT_EQ(pool.allocate(24 * kMiB), nullptr) << "64 MiB were used up";
}

TEST(BlockPoolTest, TakesTheSmallestHoleThatFits) {
  BlockPool pool(128 * kMiB);
  void* const large = pool.allocate(20 * kMiB);
  void* const between = pool.allocate(kMiB);
  void* const small = pool.allocate(5 * kMiB);
  void* const last = pool.allocate(kMiB);
  pool.free(large);
  pool.free(small);
  EXPECT_EQ(pool.allocate(4 * kMiB), small);
  EXPECT_EQ(pool.allocate(6 * kMiB), large);
  pool.free(between);
  pool.free(last);
}

TEST(BlockPoolTest, BlocksOfManyThreadsNeverOverlap) {
  BlockPool pool(512 * kMiB);
  const auto work = [&pool](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::pair<unsigned char*, std::size_t>> blocks;
    for (int i = 0; i < 400; ++i) {
      if (blocks.size() < 12 && random() % 3 != 0) {
        const std::size_t bytes = 1 + random() % kMiB;
        auto* const block = static_cast<unsigned char*>(pool.allocate(bytes));
        ASSERT_NE(block, nullptr);
        std::memset(block, int(seed), bytes);
        blocks.emplace_back(block, bytes);
      } else if (!blocks.empty()) {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        const auto [block, bytes] = blocks.back();
        ASSERT_TRUE(std::all_of(block, block + bytes, [&](unsigned char byte) { return byte == seed; }));
        pool.free(block);
        blocks.pop_back();
      }
    }
    for (const auto& [block, bytes] : blocks) pool.free(block);
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.use().live, 0U);
  EXPECT_LE(pool.use().held, 48 * kMiB + 48 * 64 + 2 * kMiB) << "4 threads of 12 blocks of 1 MiB at most";
  EXPECT_NE(pool.allocate(480 * kMiB), nullptr) << "all is one free block again";
}

// Ever larger blocks, each of which fits into no hole before it.
TEST(BlockPoolTest, HoldsAQuarterAnd64MiBMoreThanWasEverUsedAtOnce) {
  BlockPool pool(4096 * kMiB);
  std::vector<std::pair<void*, std::size_t>> separators;
  void* begin = nullptr;
  for (std::size_t mib = 1; mib <= 48; ++mib) {
    void* const block = pool.allocate(mib * kMiB);
    if (begin == nullptr) begin = block;
    std::memset(block, 1, mib * kMiB);
    separators.emplace_back(pool.allocate(kPage), kPage);
    std::memset(separators.back().first, 1, kPage);
    pool.free(block);
    const BlockPool::Use use = pool.use();
    EXPECT_LE(use.held, use.peak_live + use.peak_live / 4 + 64 * kMiB) << mib;
  }
  const std::size_t range =
      static_cast<std::size_t>(static_cast<char*>(separators.back().first) - static_cast<char*>(begin));
  EXPECT_GT(range, 500 * kMiB) << "the test wants holes";
  // Huge pages round what is there up.
  EXPECT_LE(pages_of(begin, range) * kPage, pool.use().held + 2 * kMiB * separators.size());
  EXPECT_LT(pages_of(begin, range) * kPage, 250 * kMiB);
  for (const auto& [block, bytes] : separators) pool.free(block);
}

TEST(BlockPoolTest, WithoutAddressesItGivesOutNothing) {
  BlockPool pool(std::size_t(1) << 60);  // more than a process has
  EXPECT_EQ(pool.allocate(1), nullptr);
  int other = 0;
  EXPECT_FALSE(pool.owns(&other));
}

}  // namespace
}  // namespace cohort::memory

// A heap, and another mapping of it in place of another process.
#include "cohort/net/internal/shared_heap.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "cohort/base/error.h"
#include "cohort/base/process.h"
#include "cohort/net/internal/mapped_heap.h"
#include "tests/support/comes_true.h"
#include "tests/support/throws.h"

namespace cohort::net {
namespace {

constexpr std::size_t kMiB = 1 << 20;

std::shared_ptr<MappedHeap> map_heap(SharedHeap& heap) {
  return MappedHeap::map(base::Fd(::dup(heap.descriptor())));
}
std::shared_ptr<Holder> living_process() {
  return std::make_shared<Holder>(::getpid(), "");
}
// No process of this number began then.
std::shared_ptr<Holder> dead_process() {
  return std::make_shared<Holder>(1, "never");
}
std::span<const std::byte> bytes_of_block(const std::shared_ptr<std::byte>& block, std::size_t size) {
  return {block.get(), size};
}
std::size_t pages_in_kib(int fd) {
  struct stat status {};
  ::fstat(fd, &status);
  return static_cast<std::size_t>(status.st_blocks) / 2;
}

TEST(SharedHeapTest, ABlockIsUsedAgainOnceNobodyHoldsIt) {
  const auto heap = std::make_shared<SharedHeap>(64 * kMiB, 16 * kMiB);
  std::shared_ptr<std::byte> a = heap->allocate(kMiB), b = heap->allocate(3 * kMiB);
  ASSERT_TRUE(a && b);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.get()) % 4096, 0U);
  EXPECT_EQ(heap->bytes_in_use(), 4 * kMiB);
  const std::byte* const was = a.get();
  const std::shared_ptr<std::byte> copy = a;
  a.reset();
  EXPECT_EQ(heap->bytes_in_use(), 4 * kMiB) << "a copy holds it";
  EXPECT_NE(heap->allocate(kMiB).get(), was);
}

TEST(SharedHeapTest, ThePagesOfFreeBlocksStayUpToALimit) {
  const auto heap = std::make_shared<SharedHeap>(4 * kMiB, 64 * kMiB);
  const int fd = heap->descriptor();
  const std::size_t empty = pages_in_kib(fd);
  std::shared_ptr<std::byte> a = heap->allocate(10 * kMiB);
  std::memset(a.get(), 1, 10 * kMiB);
  EXPECT_EQ(pages_in_kib(fd) - empty, 10 * 1024U);
  const std::byte* const was = a.get();
  a.reset();
  EXPECT_EQ(heap->bytes_cached(), 4 * kMiB);
  EXPECT_EQ(pages_in_kib(fd) - empty, 4 * 1024U);
  const std::shared_ptr<std::byte> warm = heap->allocate(4 * kMiB);
  EXPECT_EQ(warm.get(), was);
  EXPECT_EQ(std::to_integer<int>(*warm), 1) << "with the bytes that were there";
}

TEST(SharedHeapTest, BlocksBeginAtPagesWhateverTheLimitIs) {
  const auto heap = std::make_shared<SharedHeap>(3 * 4096 + 1, kMiB);
  for (std::size_t size = 1; size < 8 * 4096; size += 3001) {
    const std::shared_ptr<std::byte> first = heap->allocate(size), second = heap->allocate(2 * size);
    for (const auto& block : {first, second})
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.get()) % 4096, 0U) << size;
  }
}

TEST(SharedHeapTest, WhatCannotBeHadIsNull) {
  const auto heap = std::make_shared<SharedHeap>(64 * kMiB, 16 * kMiB);
  EXPECT_EQ(heap->allocate(17 * kMiB), nullptr);
  EXPECT_EQ(heap->allocate(~std::size_t{0}), nullptr);
  std::vector<std::shared_ptr<std::byte>> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(heap->allocate(kMiB));
  EXPECT_EQ(heap->allocate(1), nullptr);
  for (int i = 0; i < 16; i += 2) blocks[static_cast<std::size_t>(i)].reset();
  EXPECT_EQ(heap->allocate(2 * kMiB), nullptr) << "no two free ones are neighbours";
  blocks.clear();
  EXPECT_NE(heap->allocate(16 * kMiB), nullptr);
}

TEST(SharedHeapTest, CopiesHaveALimitAndOtherBlocksHaveNot) {
  const auto heap = std::make_shared<SharedHeap>(2 * kMiB, 64 * kMiB);
  const auto any = heap->allocate(10 * kMiB);
  auto first = heap->allocate(kMiB, SharedHeap::Purpose::kCopy);
  const auto second = heap->allocate(kMiB, SharedHeap::Purpose::kCopy);
  EXPECT_TRUE(any && first && second);
  EXPECT_EQ(heap->allocate(1, SharedHeap::Purpose::kCopy), nullptr);
  EXPECT_NE(heap->allocate(10 * kMiB), nullptr);
  first.reset();
  EXPECT_NE(heap->allocate(kMiB, SharedHeap::Purpose::kCopy), nullptr);
}

TEST(SharedHeapTest, WithoutRoomInTheAddressSpaceThereIsNoMemory) {
#ifdef COHORT_IS_SANITIZED
  return;  // the sanitizers need terabytes of it
#endif
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  rlimit little = before;
  little.rlim_cur = std::size_t{8} << 30;
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &little), 0);
  const auto heap = std::make_shared<SharedHeap>(kMiB, std::size_t{32} << 30);
  EXPECT_EQ(heap->allocate(kMiB), nullptr);
  EXPECT_EQ(heap->descriptor(), -1);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_NE(heap->allocate(kMiB), nullptr) << "it is asked for again";
}

TEST(SharedHeapTest, ALentBlockIsFreeOnceTheOtherProcessHasGivenItUp) {
  const auto heap = std::make_shared<SharedHeap>(64 * kMiB, 16 * kMiB);
  std::shared_ptr<std::byte> block = heap->allocate(kMiB);
  std::memset(block.get(), 7, kMiB);
  const auto theirs = map_heap(*heap);
  auto lease = heap->lend(bytes_of_block(block, kMiB), living_process());
  ASSERT_TRUE(lease);
  block.reset();
  EXPECT_EQ(heap->bytes_in_use(), kMiB) << "it is on its way";
  std::shared_ptr<std::byte> came = theirs->redeem(lease->handle(), kMiB);
  EXPECT_EQ(std::to_integer<int>(came.get()[kMiB - 1]), 7);
  COHORT_EXPECT_THROW_WITH(theirs->redeem(lease->handle(), kMiB), CommError,
                           "has ticket 4, but slot 0 has 5");
  lease.reset();
  EXPECT_EQ(heap->bytes_in_use(), kMiB) << "the other process holds it";
  came.reset();
  EXPECT_EQ(heap->bytes_in_use(), 0U);
}

TEST(SharedHeapTest, ALeaseThatNobodyTookComesBack) {
  const auto heap = std::make_shared<SharedHeap>(64 * kMiB, 16 * kMiB);
  const auto theirs = map_heap(*heap);
  auto block = heap->allocate(kMiB);
  auto lease = heap->lend(bytes_of_block(block, kMiB), living_process());
  const Handle handle = lease->handle();
  block.reset();
  lease.reset();
  COHORT_EXPECT_THROW_WITH(theirs->redeem(handle, kMiB), CommError, "has ticket 4, but slot 0 has 6");
  EXPECT_EQ(heap->bytes_in_use(), 0U);
  block = heap->allocate(kMiB);
  lease = heap->lend(bytes_of_block(block, kMiB), living_process());
  EXPECT_EQ(lease->handle().slot, handle.slot);
  COHORT_EXPECT_THROW_WITH(theirs->redeem(handle, kMiB), CommError, "but slot 0 has 8");
  EXPECT_TRUE(theirs->redeem(lease->handle(), kMiB));
}

TEST(SharedHeapTest, OnlyALostAndDeadProcessHoldsNothing) {
  const auto heap = std::make_shared<SharedHeap>(64 * kMiB, 16 * kMiB);
  const auto theirs = map_heap(*heap);
  const auto dead = dead_process(), alive = living_process();
  std::vector<std::shared_ptr<std::byte>> kept;
  for (const auto& holder : {dead, alive}) {
    const auto block = heap->allocate(kMiB);
    kept.push_back(theirs->redeem(heap->lend(bytes_of_block(block, kMiB), holder)->handle(), kMiB));
  }
  base::sleep(std::chrono::milliseconds(110), base::Deadline(std::chrono::seconds(10)));
  EXPECT_EQ(heap->bytes_in_use(), 2 * kMiB) << "the session still stands";
  dead->lose();
  alive->lose();
  EXPECT_TRUE(test::comes_true([&] { return heap->bytes_in_use() == kMiB; }));
  const auto next = heap->allocate(kMiB);
  const auto lease = heap->lend(bytes_of_block(next, kMiB), alive);
  kept[0].reset();  // what the dead one might have done a moment before its end
  EXPECT_TRUE(theirs->redeem(lease->handle(), kMiB)) << "the slot belongs to another lease by now";
}

TEST(SharedHeapTest, AProcessThatWasNotWaitedForIsDead) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  EXPECT_TRUE(
      test::comes_true([&] { return Holder(child, base::process_start(std::to_string(child))).is_dead(); }));
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(Holder(::getppid(), base::process_start(std::to_string(::getppid()))).is_dead());
}

TEST(SharedHeapTest, WhatIsSentBackIsTheSameMemory) {
  const auto heap = std::make_shared<SharedHeap>(64 * kMiB, 16 * kMiB);
  const auto theirs = map_heap(*heap);
  const auto holder = living_process();
  auto block = heap->allocate(kMiB);
  const std::byte* const was = block.get();
  auto came = theirs->redeem(heap->lend(bytes_of_block(block, kMiB), holder)->handle(), kMiB);
  block.reset();
  auto found = theirs->find({came.get() + 100, 5000});
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->first.is_receivers);
  auto back = heap->take_back(found->first, 5000, *holder);
  EXPECT_EQ(back.get(), was + 100);
  EXPECT_EQ(heap->take_back(found->first, 5000, *living_process()), nullptr)
      << "it was lent to another process";
  EXPECT_EQ(heap->take_back(found->first, kMiB, *holder), nullptr) << "it ends outside of the block";
  Handle wrong = found->first;
  wrong.ticket += 4;
  EXPECT_EQ(heap->take_back(wrong, 10, *holder), nullptr);
  wrong = found->first;
  wrong.slot = kHeapSlots;
  EXPECT_EQ(heap->take_back(wrong, 10, *holder), nullptr);
  came.reset();
  EXPECT_TRUE(theirs->find({found->second.get(), kMiB})) << "what was found keeps the hold";
  found.reset();
  EXPECT_EQ(heap->bytes_in_use(), kMiB) << "this process has it again";
  back.reset();
  EXPECT_EQ(heap->bytes_in_use(), 0U);
}

TEST(SharedHeapTest, HandlesThatLeadElsewhereAreErrors) {
  const auto heap = std::make_shared<SharedHeap>(64 * kMiB, 16 * kMiB);
  const auto theirs = map_heap(*heap);
  const auto block = heap->allocate(kMiB);
  const auto lease = heap->lend(bytes_of_block(block, kMiB), living_process());
  Handle wrong = lease->handle();
  wrong.slot = kHeapSlots;
  COHORT_EXPECT_THROW_WITH(theirs->redeem(wrong, 10), CommError,
                           "a handle of 10 bytes has slot 8192 of 8192");
  for (const std::uint64_t offset : {std::uint64_t{0}, kHeapHeaderBytes + 16 * kMiB - 9, ~std::uint64_t{0}}) {
    wrong = lease->handle();
    wrong.offset = offset;
    COHORT_EXPECT_THROW_WITH(theirs->redeem(wrong, 10), CommError,
                             base::concat("begins at ", offset, " of "));
  }
  EXPECT_TRUE(theirs->redeem(lease->handle(), kMiB)) << "nothing was taken";
  const base::SharedMemory small = base::SharedMemory::create("test", kHeapHeaderBytes, false);
  COHORT_EXPECT_THROW_WITH(MappedHeap::map(base::Fd(::dup(small.fd()))), SystemError,
                           "the memory of a heap has");
}

TEST(SharedHeapTest, MoreLeasesThanSlotsAreNotGiven) {
  const auto heap = std::make_shared<SharedHeap>(64 * kMiB, 16 * kMiB);
  const auto block = heap->allocate(kMiB);
  std::vector<std::shared_ptr<SharedHeap::Lease>> leases;
  for (std::uint32_t i = 0; i < kHeapSlots; ++i) {
    leases.push_back(heap->lend(bytes_of_block(block, kMiB), living_process()));
    ASSERT_TRUE(leases.back()) << i;
  }
  EXPECT_EQ(heap->lend(bytes_of_block(block, kMiB), living_process()), nullptr);
  leases.pop_back();
  EXPECT_TRUE(heap->lend(bytes_of_block(block, kMiB), living_process()));
}

TEST(SharedHeapTest, AProcessThatWasForkedFreesNothing) {
  const auto heap = std::make_shared<SharedHeap>(0, 16 * kMiB);  // what is free has no pages
  auto block = heap->allocate(kMiB);
  auto lent = heap->allocate(kMiB);
  const auto theirs = map_heap(*heap);
  auto lease = heap->lend(bytes_of_block(lent, kMiB), living_process());
  auto came = theirs->redeem(lease->handle(), kMiB);
  std::memset(block.get(), 5, kMiB);
  const pid_t child = ::fork();
  if (child == 0) {
    block.reset();
    came.reset();
    lease.reset();
    lent.reset();
    heap->collect();
    ::_exit(heap->allocate(kMiB) == nullptr ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(std::to_integer<int>(block.get()[100]), 5);
  lent.reset();
  EXPECT_EQ(heap->bytes_in_use(), 2 * kMiB);
}

// What a random program holds, on this side and the other one.
class HeapProgram {
 public:
  HeapProgram(unsigned seed, bool kills) : random_(seed), kills_(kills) { theirs_ = map_heap(*heap_); }

  void run() {
    for (int step = 0; step < 400; ++step) do_step();
    check();
    own_.clear();
    leases_.clear();
    came_.clear();
    EXPECT_TRUE(test::comes_true([&] { return heap_->bytes_in_use() == 0; })) << heap_->bytes_in_use();
    buried_.clear();
    EXPECT_EQ(heap_->bytes_in_use(), 0U);
  }

 private:
  struct Bytes {
    std::shared_ptr<std::byte> memory;
    std::size_t size = 0;
    int mark = 0;  // the value of each byte
  };
  struct OnItsWay {
    std::shared_ptr<SharedHeap::Lease> lease;
    std::size_t size = 0;
    int mark = 0;
  };

  std::size_t pick(std::size_t below) { return random_() % below; }
  template <typename T>
  T take_any(std::vector<T>& from) {
    std::swap(from[pick(from.size())], from.back());
    T taken = std::move(from.back());
    from.pop_back();
    return taken;
  }
  void write(Bytes& bytes) {
    bytes.mark = static_cast<int>(pick(250)) + 1;
    std::memset(bytes.memory.get(), bytes.mark, bytes.size);
  }
  static bool is_whole(const Bytes& bytes) {
    const auto is_mark = [&](std::byte byte) { return std::to_integer<int>(byte) == bytes.mark; };
    return std::all_of(bytes.memory.get(), bytes.memory.get() + bytes.size, is_mark);
  }

  void do_step() {
    switch (kills_ && pick(80) == 0 ? 7 : pick(7)) {
      case 0: {
        Bytes bytes{nullptr, 1 + pick(300'000), 0};
        bytes.memory = heap_->allocate(bytes.size,
                                       pick(2) == 0 ? SharedHeap::Purpose::kAny : SharedHeap::Purpose::kCopy);
        if (bytes.memory == nullptr) break;
        write(bytes);
        own_.push_back(bytes);
        if (own_.size() > 8) take_any(own_);
        break;
      }
      case 1: {  // moved to the other side, which may not take it
        if (own_.empty()) break;
        const Bytes bytes = take_any(own_);
        leases_.push_back(
            {heap_->lend(bytes_of_block(bytes.memory, bytes.size), holder_), bytes.size, bytes.mark});
        ASSERT_TRUE(leases_.back().lease);
        break;
      }
      case 2:
        if (!leases_.empty()) take_any(leases_);
        break;
      case 3: {
        if (leases_.empty()) break;
        const OnItsWay coming = take_any(leases_);
        came_.push_back({theirs_->redeem(coming.lease->handle(), coming.size), coming.size, coming.mark});
        break;
      }
      case 4: {  // the other side owns it: it writes, and sends it home
        if (came_.empty()) break;
        Bytes bytes = take_any(came_);
        ASSERT_TRUE(is_whole(bytes));
        write(bytes);
        const auto found = theirs_->find(bytes_of_block(bytes.memory, bytes.size));
        ASSERT_TRUE(found);
        bytes.memory = heap_->take_back(found->first, bytes.size, *holder_);
        ASSERT_TRUE(bytes.memory);
        own_.push_back(bytes);
        break;
      }
      case 5:
        if (came_.empty()) break;
        ASSERT_TRUE(is_whole(take_any(came_)));
        break;
      case 6:
        heap_->collect();
        check();
        break;
      case 7:  // the other process is killed, and another one comes: what the first held is never given up
        for (Bytes& bytes : came_) buried_.push_back(std::move(bytes.memory));
        came_.clear();
        leases_.clear();
        holder_->lose();
        holder_ = dead_process();
        theirs_ = map_heap(*heap_);
        break;
    }
  }
  void check() {
    for (const std::vector<Bytes>* side : {&own_, &came_}) {
      for (const Bytes& bytes : *side) ASSERT_TRUE(is_whole(bytes));
    }
  }

  std::mt19937 random_;
  const bool kills_;
  const std::shared_ptr<SharedHeap> heap_ = std::make_shared<SharedHeap>(kMiB, 8 * kMiB);
  std::shared_ptr<MappedHeap> theirs_;
  std::shared_ptr<Holder> holder_ = dead_process();
  std::vector<Bytes> own_, came_;
  std::vector<OnItsWay> leases_;
  std::vector<std::shared_ptr<std::byte>> buried_;
};

TEST(SharedHeapTest, RandomProgramsSpoilNoByteThatIsHeldAndLeaveNothing) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(base::concat("seed ", seed));
    HeapProgram(seed, seed % 3 == 0).run();
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace cohort::net

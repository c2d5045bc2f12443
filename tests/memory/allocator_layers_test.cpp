#include "cohort/memory/internal/allocator_layers.h"

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <atomic>
#include <thread>
#include <vector>

#include "cohort/memory/allocation_profiler.h"

namespace cohort::memory {
namespace {

// The example of the header.
class Counting final : public AllocatorLayer {
 public:
  static Counting& get() {
    static Counting& instance = *new Counting;  // leaked: blocks outlive statics
    return instance;
  }
  c10::DataPtr allocate(std::size_t bytes, LayeredAllocator& next) override {
    c10::DataPtr block = next.allocate(bytes);
    if (block.get_deleter() == next.raw_deleter()) ++live;
    return block;
  }
  bool take_back(void* /*block*/) override { return --live, false; }
  std::atomic<int> live{0};

 private:
  Counting() { LayeredAllocator::add(LayeredAllocator::Place::kArena, *this); }
};

TEST(AllocatorLayersTest, SeeWhatAnyThreadAllocatesAndFrees) {
  const at::Tensor before = torch::ones({100});
  const int live = Counting::get().live;
  std::vector<at::Tensor> tensors;
  for (int i = 1; i <= 3; ++i) {
    tensors.push_back(torch::full({50, 4}, i));
    EXPECT_EQ(Counting::get().live, live + i);
  }
  EXPECT_EQ(tensors[2].sum().item<float>(), 3.0F * 200);
  std::thread([&] { tensors.clear(); }).join();
  EXPECT_EQ(Counting::get().live, live);
  const at::Tensor copy = before.clone();
  EXPECT_TRUE(copy.equal(before));
}

// As an operator's work space is taken: the block's context is its own address.
TEST(AllocatorLayersTest, HandOnRawBlocks) {
  const int live = Counting::get().live;
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  void* const block = allocator.raw_allocate(1000);
  EXPECT_EQ(Counting::get().live, live + 1);
  allocator.raw_deallocate(block);
  EXPECT_EQ(Counting::get().live, live);
}

// A block from before the layers, and one of a layer, go to the deleter of all.
TEST(AllocatorLayersTest, TakeBackBlocksOfTheAllocatorBehind) {
  void* const before = c10::GetDefaultCPUAllocator()->raw_allocate(1000);
  static_cast<void>(Counting::get());
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  EXPECT_NE(&allocator, c10::GetDefaultCPUAllocator());
  EXPECT_TRUE(LayeredAllocator::ends_at(c10::GetDefaultCPUAllocator()));
  const int live = Counting::get().live;
  allocator.raw_deallocate(before);
  EXPECT_EQ(Counting::get().live, live - 1);
}

// One that answers some requests itself.
class Answering final : public AllocatorLayer {
 public:
  static Answering& get() {
    static Answering& instance = *new Answering;  // leaked: blocks outlive statics
    return instance;
  }
  c10::DataPtr allocate(std::size_t bytes, LayeredAllocator& next) override {
    if (bytes != 4000) return next.allocate(bytes);
    return {memory_.data(), memory_.data(), next.raw_deleter(), c10::Device(c10::kCPU)};
  }
  bool take_back(void* block) override {
    if (block != memory_.data()) return false;
    ++num_returned;
    return true;
  }
  int num_returned = 0;

 private:
  Answering() { LayeredAllocator::add(LayeredAllocator::Place::kPool, *this); }

  std::vector<float> memory_ = std::vector<float>(1024);
};

TEST(AllocatorLayersTest, HaveOneOrderWhicheverComesFirst) {
  static_cast<void>(Answering::get());
  const AllocationProfiler profiler;
  static_cast<void>(Counting::get());
  const int live = Counting::get().live;
  {
    const at::Tensor answered = torch::empty({1000}), other = torch::empty({10});
    EXPECT_EQ(Counting::get().live, live + 2);
    EXPECT_EQ(profiler.total().now, 4040);
  }
  EXPECT_EQ(Answering::get().num_returned, 1);
  EXPECT_EQ(Counting::get().live, live);
  EXPECT_EQ(profiler.total().now, 0);
}

}  // namespace
}  // namespace cohort::memory

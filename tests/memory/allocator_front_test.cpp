#include "cohort/memory/allocator_front.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <atomic>
#include <thread>
#include <vector>

namespace cohort::memory {
namespace {

// The example of the header.
class Counting final : public AllocatorFront<Counting> {
 public:
  Counting() : AllocatorFront(c10::GetCPUAllocator()) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr block = behind().allocate(bytes);
    if (adopt(block)) ++live;
    return block;
  }
  bool take_back(void* /*block*/) { return --live, false; }
  std::atomic<int> live{0};
};

TEST(AllocatorFrontTest, SeesWhatAnyThreadAllocatesAndFrees) {
  const at::Tensor before = torch::ones({100});
  c10::SetCPUAllocator(&Counting::get(), /*priority=*/255);
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
TEST(AllocatorFrontTest, HandsOnRawBlocks) {
  c10::SetCPUAllocator(&Counting::get(), /*priority=*/255);
  const int live = Counting::get().live;
  void* const block = Counting::get().raw_allocate(1000);
  EXPECT_EQ(Counting::get().live, live + 1);
  Counting::get().raw_deallocate(block);
  EXPECT_EQ(Counting::get().live, live);
}

}  // namespace
}  // namespace cohort::memory

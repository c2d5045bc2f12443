// LibTorch's global generator among threads that run functions a second time. What second runs draw is tested
// with autograd::recompute.
#include "cohort/core/generator_states.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::core {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Global = GeneratorStates::Global;

GeneratorStates taken() {
  return GeneratorStates(std::vector<at::Generator>());
}

// Each thread's function waits for the other's: they would wait for ever.
TEST(GeneratorStatesTest, AFunctionThatWaitsForAnotherThreadsSecondRunEndsInAnError) {
  const GeneratorStates states = taken();
  const GeneratorStates::Again first(states, Global::kItself);
  const base::Deadline waited(seconds(60));
  auto other = std::async(std::launch::async, [&] {
    const GeneratorStates of_thread = taken();
    COHORT_EXPECT_THROW_WITH(GeneratorStates::Again(of_thread, Global::kItself, milliseconds(100)),
                             TimeoutError, "which another thread's function has while it runs a second time");
    COHORT_EXPECT_THROW_WITH(GlobalGeneratorAsFound(milliseconds(100)), TimeoutError, "global generator");
    const GeneratorStates::Again on_copies(of_thread);  // takes no turn
  });
  ASSERT_EQ(other.wait_for(seconds(10)), std::future_status::ready);
  other.get();
  EXPECT_LT(waited.elapsed(), seconds(5));
}

TEST(GeneratorStatesTest, OneThreadAtATimeHasTheGlobalGenerator) {
  at::manual_seed(7);
  const at::Tensor before = at::detail::getDefaultCPUGenerator().get_state();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([] {
      const GeneratorStates states = taken();
      for (int i = 0; i < 50; ++i) {
        const GeneratorStates::Again outer(states, Global::kItself);
        const GeneratorStates::Again inner(states, Global::kItself);  // within its own turn
        const GlobalGeneratorAsFound found;
        at::rand({3});
        EXPECT_FALSE(found.holds());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(at::equal(before, at::detail::getDefaultCPUGenerator().get_state()));
}

// What other threads lend meanwhile may not be taken for a change, and undone over their states.
TEST(GeneratorStatesTest, WhatAnotherThreadLendsMeanwhileIsNoChange) {
  at::manual_seed(7);
  std::atomic<bool> is_over{false};
  std::thread lender([&] {
    const GeneratorStates states = taken();
    const auto seeded = at::make_generator<at::CPUGeneratorImpl>(11);
    while (!is_over.load()) {
      const GeneratorStates::Again again(states, Global::kItself);
      at::manual_seed(11);
      std::this_thread::yield();
      EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), seeded.get_state()));
    }
  });
  for (int i = 0; i < 2000; ++i) {
    const GlobalGeneratorAsFound found;
    std::this_thread::yield();
    EXPECT_TRUE(found.holds()) << i;
  }
  is_over = true;
  lender.join();
}

TEST(ReseededGeneratorsTest, DrawFromNewSeedsAndAreAfterwardsWhereTheyWere) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto twin = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto drawn = [](const at::Generator& from) { return at::rand({8}, from, at::kFloat); };
  drawn(generator);
  const at::Tensor next = (drawn(twin), drawn(twin));
  {
    const ReseededGenerators reseeded({generator});
    EXPECT_FALSE(at::equal(drawn(generator), next));
  }
  EXPECT_TRUE(at::equal(drawn(generator), next));
}

TEST(ReseededGeneratorsTest, AGeneratorThatStandsThereTwiceIsRestoredToo) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const at::Tensor before = generator.get_state();
  { const ReseededGenerators reseeded({generator, generator}); }
  EXPECT_TRUE(at::equal(generator.get_state(), before));
}

TEST(GeneratorsOfGpusTest, OtherDevicesHaveNone) {
  EXPECT_TRUE(generators_of_gpus({c10::kCPU, c10::kMeta}).empty());
}

}  // namespace
}  // namespace cohort::core

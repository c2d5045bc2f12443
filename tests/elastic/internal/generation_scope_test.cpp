#include "cohort/elastic/internal/generation_scope.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "tests/support/comes_true.h"

namespace cohort::elastic {
namespace {

using std::chrono::milliseconds;

// In no generation yet: number 0.
TEST(GenerationScopeTest, ALongWaitIsToldAndSoIsItsEnd) {
  const auto inbox = std::make_shared<ProcessInbox>([](membership::MemberId) {});
  std::atomic<int> num_told{0}, num_ended{0};
  inbox->on_long_wait([&](bool is_waiting) { ++(is_waiting ? num_told : num_ended); });
  const auto scope = GenerationScope::make(inbox, {.long_wait = milliseconds(1)});
  {
    const comm::OwnerWait waiting(scope.get());
    const comm::OwnerWait in_the_store(scope.get());
    test::wait_until([&] { return num_told == 1; });
    std::thread([&] { const comm::OwnerWait of_another_thread(scope.get()); }).join();
    EXPECT_EQ(num_ended, 0);
  }
  EXPECT_EQ(num_told, 1);
  EXPECT_EQ(num_ended, 1);
  inbox->close();
}

}  // namespace
}  // namespace cohort::elastic

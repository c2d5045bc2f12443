#include "cohort/comm/backends/mpi/internal/inbox.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/comes_true.h"

namespace cohort::comm::mpi {
namespace {

using namespace std::chrono_literals;
using Clock = base::Deadline::Clock;

MpiWorkPtr barrier_call() {
  return c10::make_intrusive<MpiWork>(CpuCall{.timeout = 1min}, CallGroup{"group", 0, 1},
                                      std::vector<MpiWork::Step>(), nullptr);
}

TEST(MpiInboxTest, AllThatIsNewIsTakenOnceInTheOrderInWhichItCame) {
  Inbox inbox;
  std::string order;
  const MpiWorkPtr first = barrier_call(), second = barrier_call();
  inbox.add_call(first);
  inbox.add_task([&] { order += 'a'; });
  inbox.add_call(second);
  inbox.add_task([&] { order += 'b'; });
  const Inbox::News news = inbox.take();
  EXPECT_EQ(news.calls, (std::vector<MpiWorkPtr>{first, second}));
  for (const Inbox::Task& task : news.tasks) task();
  EXPECT_EQ(order, "ab");
  const Inbox::News none = inbox.take();
  EXPECT_TRUE(none.calls.empty());
  EXPECT_TRUE(none.tasks.empty());
}

TEST(MpiInboxTest, ABlockingTaskWaitsUntilTheCallsBeforeItAreTaken) {
  Inbox inbox;
  std::string order;
  inbox.add_call(barrier_call());
  inbox.add_blocking_task([&] { order += 'a'; });
  inbox.add_blocking_task([&] { order += 'b'; });
  EXPECT_FALSE(inbox.take_blocking_task()) << "a collective may have begun before it";
  EXPECT_TRUE(inbox.take().tasks.empty()) << "take() leaves it";
  for (int i = 0; i < 2; ++i) {
    const Inbox::Task task = inbox.take_blocking_task();
    ASSERT_TRUE(task);
    task();
  }
  EXPECT_EQ(order, "ab");
  EXPECT_FALSE(inbox.take_blocking_task());
}

TEST(MpiInboxTest, TasksThatComeAfterTheEndAreDropped) {
  Inbox inbox;
  inbox.close();
  const auto token = std::make_shared<int>(0);
  inbox.add_task([token] {});
  inbox.add_blocking_task([token] {});
  EXPECT_EQ(token.use_count(), 1);
  EXPECT_TRUE(inbox.take().tasks.empty());
  EXPECT_FALSE(inbox.take_blocking_task());
}

TEST(MpiInboxTest, WaitEndsOnceSomethingIsNew) {
  const std::vector<std::function<void(Inbox&)>> news = {
      [](Inbox& inbox) { inbox.add_call(barrier_call()); },
      [](Inbox& inbox) { inbox.add_task([] {}); },
      [](Inbox& inbox) { inbox.add_blocking_task([] {}); },
      [](Inbox& inbox) { inbox.stop(0ms, false); },
  };
  for (std::size_t i = 0; i < news.size(); ++i) {
    Inbox inbox;
    std::thread other([&] { news[i](inbox); });
    const auto begin = Clock::now();
    inbox.wait(1min);
    EXPECT_LT(Clock::now() - begin, 50s) << i;
    other.join();
    inbox.wait(1min);  // it is still there
    EXPECT_LT(Clock::now() - begin, 50s) << i;
  }
}

TEST(MpiInboxTest, WaitEndsAfterItsTime) {
  Inbox inbox;
  const auto begin = Clock::now();
  inbox.wait(5ms);
  EXPECT_GE(Clock::now() - begin, 5ms);
}

TEST(MpiInboxTest, StopReturnsOnceTheEnginesThreadHasClosedIt) {
  Inbox inbox;
  EXPECT_FALSE(inbox.is_stopping());
  std::atomic<bool> is_closed{false};
  std::thread engine([&] {
    EXPECT_TRUE(test::comes_true([&] { return inbox.is_stopping(); }));
    is_closed = true;
    inbox.close();
  });
  const auto begin = Clock::now();
  inbox.stop(1min, false);
  EXPECT_TRUE(is_closed);
  EXPECT_LT(Clock::now() - begin, 50s);
  engine.join();
  inbox.stop(1min, true);
  EXPECT_LT(Clock::now() - begin, 50s) << "it is closed";
}

TEST(MpiInboxTest, StopWaitsForTheLongestTimeoutWhereItIsAsked) {
  Inbox inbox;
  inbox.set_exit_timeout(20ms);
  inbox.set_exit_timeout(10ms);
  EXPECT_EQ(inbox.exit_timeout(), 20ms);
  auto begin = Clock::now();
  inbox.stop(10ms, true);
  EXPECT_GE(Clock::now() - begin, 30ms);
  inbox.set_exit_timeout(1h);
  begin = Clock::now();
  inbox.stop(10ms, false);
  EXPECT_GE(Clock::now() - begin, 10ms);
  EXPECT_LT(Clock::now() - begin, 50s);
}

}  // namespace
}  // namespace cohort::comm::mpi

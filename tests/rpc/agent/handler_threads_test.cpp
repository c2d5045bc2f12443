#include "cohort/rpc/internal/agent/handler_threads.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>

namespace cohort::rpc {
namespace {

using std::chrono::microseconds;

TEST(HandlerThreadsTest, AFunctionIsQuickAfter16QuickRunsInARow) {
  HandlerThreads threads;
  for (int run = 0; run < 15; ++run) threads.note_run("embed", microseconds(50));
  EXPECT_FALSE(threads.is_quick("embed"));
  threads.note_run("embed", microseconds(50));
  EXPECT_TRUE(threads.is_quick("embed"));
  EXPECT_FALSE(threads.is_quick("another"));
}

TEST(HandlerThreadsTest, ALongRunSendsTheNext100ToThePool) {
  HandlerThreads threads;
  for (int run = 0; run < 1000; ++run) threads.note_run("embed", microseconds(1));
  threads.note_run("embed", microseconds(51));
  for (int run = 0; run < 99; ++run) threads.note_run("embed", microseconds(1));
  EXPECT_FALSE(threads.is_quick("embed"));
  threads.note_run("embed", microseconds(1));
  EXPECT_TRUE(threads.is_quick("embed"));
}

TEST(HandlerThreadsTest, HandlersCountInTheQueueOrOnAThread) {
  const auto threads = std::make_shared<HandlerThreads>();
  HandlerThreads::Queued begins(threads);
  auto dropped = std::make_unique<HandlerThreads::Queued>(threads);
  EXPECT_EQ(threads->num_queued(), 2U);
  {
    const HandlerThreads::OnThread running(*threads);
    begins.begin();
    EXPECT_EQ(threads->num_queued(), 1U);
    EXPECT_EQ(threads->num_on_threads(), 1U);
  }
  dropped = nullptr;
  EXPECT_EQ(threads->num_queued(), 0U);
  EXPECT_EQ(threads->num_on_threads(), 0U);
}

TEST(HandlerThreadsTest, AHandlerIsOnTheNodesThreadWhileItRunsThere) {
  HandlerThreads threads;
  EXPECT_FALSE(threads.is_on_node_thread());
  {
    const HandlerThreads::OnNodeThread running(threads);
    EXPECT_TRUE(threads.is_on_node_thread());
  }
  EXPECT_FALSE(threads.is_on_node_thread());
}

}  // namespace
}  // namespace cohort::rpc

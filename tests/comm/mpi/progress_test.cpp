// Calls whose steps begin no requests, so MPI is never started. A queue with a stranger at its front holds
// its calls.
#include "cohort/comm/backends/mpi/internal/progress.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/comes_true.h"
#include "tests/support/throws.h"

namespace cohort::comm::mpi {
namespace {

using namespace std::chrono_literals;
using std::chrono::microseconds;

class MpiProgressTest : public testing::Test {
 protected:
  using Queue = std::shared_ptr<OrderedQueue>;

  /// A call of two steps, which write `name` to the log.
  MpiWorkPtr add(char name, const Queue& queue, std::chrono::milliseconds timeout = 1min) {
    const auto step = [this, name](PendingRequests&) { log += name; };
    return add({step, step}, queue, timeout);
  }
  MpiWorkPtr add(std::vector<MpiWork::Step> steps, const Queue& queue,
                 std::chrono::milliseconds timeout = 1min) {
    auto call = c10::make_intrusive<MpiWork>(
        CpuCall{.type = CallType::kAllReduce, .timeout = timeout, .number = num_calls++},
        CallGroup{"group", 1, 3}, std::move(steps), queue);
    progress.add(call);
    return call;
  }
  /// Its calls wait until release().
  Queue held_queue() {
    auto queue = std::make_shared<OrderedQueue>();
    queue->calls.push_back(this);
    return queue;
  }
  static void release(OrderedQueue& queue) { queue.calls.pop_front(); }

  std::atomic<bool> failed{false};
  Progress progress{failed};
  std::uint64_t num_calls = 0;
  std::string log;
};

TEST_F(MpiProgressTest, CallsOfAQueueRunInTheirOrderAndMessagesBesideThem) {
  const Queue queue = held_queue();
  const MpiWorkPtr a = add('a', queue), b = add('b', queue), message = add('m', nullptr);
  EXPECT_TRUE(progress.has_collectives());
  EXPECT_TRUE(progress.advance());
  EXPECT_EQ(log, "mm");
  EXPECT_TRUE(message->isCompleted());
  EXPECT_FALSE(a->isCompleted());
  EXPECT_FALSE(progress.advance());
  release(*queue);
  while (progress.advance()) {
  }
  EXPECT_EQ(log, "mmaabb");
  EXPECT_TRUE(a->wait(0ms));
  EXPECT_TRUE(b->wait(0ms));
  EXPECT_TRUE(progress.is_empty());
  EXPECT_FALSE(progress.has_collectives());
  EXPECT_FALSE(failed);
}

TEST_F(MpiProgressTest, AMessageIsNoCollective) {
  const MpiWorkPtr message = add('m', nullptr);
  EXPECT_FALSE(progress.has_collectives());
  EXPECT_FALSE(progress.is_empty());
}

TEST_F(MpiProgressTest, NothingOfAQueueRunsAfterACallThatFailed) {
  const auto queue = std::make_shared<OrderedQueue>(), other = std::make_shared<OrderedQueue>();
  const MpiWorkPtr fails = add({[](PendingRequests&) { throw std::runtime_error("no such rank"); }}, queue);
  const MpiWorkPtr after = add('a', queue), beside = add('b', other);
  EXPECT_TRUE(progress.advance());
  EXPECT_TRUE(failed);
  COHORT_EXPECT_THROW_WITH(fails->wait(0ms), std::runtime_error, "no such rank");
  EXPECT_TRUE(beside->wait(0ms));
  EXPECT_FALSE(progress.advance());
  EXPECT_FALSE(after->isCompleted());
  EXPECT_EQ(log, "bb");
  EXPECT_FALSE(progress.is_empty()) << "MPI may still write to its tensors";
  EXPECT_TRUE(progress.has_collectives());
  EXPECT_FALSE(progress.must_abort()) << "no call was late";
}

TEST_F(MpiProgressTest, ALateCallFailsAndTheFirstOneIsTheReason) {
  const Queue queue = held_queue();
  progress.end_late_calls();
  EXPECT_EQ(progress.abort_reason(), "");
  const MpiWorkPtr first = add('a', queue, 1ms);
  ASSERT_TRUE(test::comes_true([&] {
    progress.end_late_calls();
    return first->isCompleted();
  }));
  const std::string reason = "all_reduce, call 0 of group 'group' (rank 1/3) timed out after ";
  COHORT_EXPECT_THROW_WITH(first->wait(0ms), std::runtime_error, reason);
  EXPECT_TRUE(progress.abort_reason().starts_with(reason)) << progress.abort_reason();
  EXPECT_FALSE(progress.must_abort()) << "the program may still say more";
  EXPECT_TRUE(failed);
  const MpiWorkPtr second = add('b', queue, 1ms);
  const MpiWorkPtr in_time = add('c', queue);
  ASSERT_TRUE(test::comes_true([&] {
    progress.end_late_calls();
    return second->isCompleted();
  }));
  EXPECT_TRUE(progress.abort_reason().starts_with(reason)) << progress.abort_reason();
  EXPECT_FALSE(in_time->isCompleted());
  release(*queue);
  EXPECT_FALSE(progress.advance());
  EXPECT_EQ(log, "") << "nothing runs after a late call";
}

TEST_F(MpiProgressTest, WhoWaitsForLessThanTheDeadlineMakesItsCallLate) {
  const MpiWorkPtr call = add('a', held_queue());
  progress.end_late_calls();
  EXPECT_FALSE(call->isCompleted());
  std::string error;
  std::thread waits([&] {
    try {
      call->wait(1ms);
    } catch (const std::runtime_error& thrown) {
      error = thrown.what();
    }
  });
  EXPECT_TRUE(test::comes_true([&] {
    progress.end_late_calls();
    return call->isCompleted();
  }));
  waits.join();
  EXPECT_NE(error.find("timed out"), std::string::npos) << error;
}

TEST_F(MpiProgressTest, ThePauseGrowsWhileNothingMoves) {
  EXPECT_EQ(progress.pause_time(true), 10ms) << "there is nothing to do";
  const MpiWorkPtr call = add('a', held_queue());
  EXPECT_EQ(progress.pause_time(true), 0us);
  microseconds last(0);
  EXPECT_TRUE(test::comes_true([&] {
    const microseconds pause = progress.pause_time(false);
    EXPECT_GE(pause, last);
    last = pause;
    return pause == 1ms;
  }));
  EXPECT_EQ(progress.pause_time(true), 0us);
}

}  // namespace
}  // namespace cohort::comm::mpi

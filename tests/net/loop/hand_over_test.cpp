#include "cohort/net/internal/loop/hand_over.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <semaphore>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/threads/wait.h"
#include "tests/support/patience.h"

namespace cohort::net::node_detail {
namespace {

// Tells in which order the events came, and does in a function of the handler what a test wants.
struct Listing : Handler {
  void on_connect(const std::shared_ptr<Peer>&) override { add("connect"); }
  void on_message(const std::shared_ptr<Peer>&, Message message) override { add(message.header); }
  void on_down(const std::shared_ptr<Peer>&, Down down) override { add(down.text); }
  void add(const std::string& name) {
    has_met_another = has_met_another || is_busy.exchange(true);
    names.push_back(name);
    if (on_event) on_event(name);
    is_busy = false;
  }
  std::vector<std::string> names;
  std::function<void(const std::string& name)> on_event;
  std::atomic<bool> is_busy{false}, has_met_another{false};
};

struct Queue {
  void push(const std::string& name) {
    const std::lock_guard lock(node.mutex);
    push_locked(name);
  }
  void push_locked(const std::string& name) {
    Message message;
    message.header = name;
    hand_over.push({nullptr, false, std::move(message), std::nullopt});
  }
  void run(const std::function<bool()>& is_done = nullptr) {
    std::unique_lock lock(node.mutex);
    hand_over.run(lock, is_done);
    EXPECT_TRUE(lock.owns_lock());
  }
  bool is_idle() {
    const std::lock_guard lock(node.mutex);
    return hand_over.is_idle();
  }

  NodeLock node;
  std::shared_ptr<Listing> heard = std::make_shared<Listing>();
  int num_posted = 0;
  HandOver hand_over{node, heard, [this] { ++num_posted; }};
};

using Names = std::vector<std::string>;

TEST(HandOverTest, EachKindOfEventComesInTheOrderOfPush) {
  Queue queue;
  queue.hand_over.locked([&] {
    queue.hand_over.push({nullptr, true, std::nullopt, std::nullopt});
    queue.push_locked("message");
    queue.hand_over.push({nullptr, false, std::nullopt, Down{DownKind::kLeft, "left", {}}});
    EXPECT_TRUE(queue.heard->names.empty()) << "nothing is handed over under the mutex";
  });
  EXPECT_EQ(queue.heard->names, (Names{"connect", "message", "left"}));
  queue.run();
  EXPECT_EQ(queue.heard->names.size(), 3U) << "each comes once";
  EXPECT_TRUE(queue.is_idle());
}

TEST(HandOverTest, OneThreadAtATimeHandsOverInTheOrderOfAllPushes) {
  constexpr int kThreads = 4, kEach = 500;
  Queue queue;
  Names pushed;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int k = 0; k < kEach; ++k) {
        queue.hand_over.locked([&] {
          pushed.push_back(std::to_string(i) + "/" + std::to_string(k));
          queue.push_locked(pushed.back());
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(queue.heard->has_met_another);
  EXPECT_EQ(queue.heard->names, pushed);
  EXPECT_TRUE(queue.is_idle());
}

TEST(HandOverTest, TheMutexIsFreeInAFunctionOfTheHandler) {
  Queue queue;
  bool was_free = false;
  queue.heard->on_event = [&](const std::string&) {
    std::thread([&] {
      std::unique_lock lock(queue.node.mutex, std::try_to_lock);
      was_free = lock.owns_lock();
    }).join();
  };
  queue.push("message");
  queue.run();
  EXPECT_TRUE(was_free);
}

TEST(HandOverTest, WhoHasItsAnswerLeavesTheRestToTheNodesOwnThread) {
  Queue queue;
  for (const char* name : {"0", "1", "2"}) queue.push(name);
  queue.run([&] { return queue.heard->names.size() == 2; });
  EXPECT_EQ(queue.heard->names, (Names{"0", "1"}));
  EXPECT_EQ(queue.num_posted, 1);
  EXPECT_TRUE(queue.is_idle());
  queue.run([&] { return queue.heard->names.size() == 3; });
  EXPECT_EQ(queue.heard->names, (Names{"0", "1", "2"}));
  EXPECT_EQ(queue.num_posted, 1) << "there is no rest";
}

TEST(HandOverTest, AfterTheStopNothingIsLeftToTheNodesOwnThread) {
  Queue queue;
  for (const char* name : {"0", "1", "2"}) queue.push(name);
  queue.node.is_stopped = true;
  queue.run([] { return true; });
  EXPECT_EQ(queue.heard->names, (Names{"0", "1", "2"}));
  EXPECT_EQ(queue.num_posted, 0);
}

TEST(HandOverTest, AFunctionThatWaitsHandsOverInItsTurn) {
  Queue queue;
  queue.heard->on_event = [&](const std::string& name) {
    queue.heard->is_busy = false;
    if (name == "0") queue.run([&] { return queue.heard->names.size() == 2; });
    EXPECT_FALSE(queue.is_idle()) << "the outer run() has the turn yet";
  };
  for (const char* name : {"0", "1", "2"}) queue.push(name);
  queue.run();
  EXPECT_EQ(queue.heard->names, (Names{"0", "1", "2"}));
  EXPECT_TRUE(queue.is_idle());
}

// Both ways in which a function of the handler loses its turn.
class HandOverTurnTest : public testing::TestWithParam<bool> {};

TEST_P(HandOverTurnTest, AnotherThreadContinuesWhileAFunctionWaits) {
  Queue queue;
  const auto first = std::this_thread::get_id();
  queue.heard->on_event = [&](const std::string& name) {
    EXPECT_EQ(std::this_thread::get_id() == first, name == "0");
    if (name != "0") return;
    queue.heard->is_busy = false;
    {
      const std::lock_guard lock(queue.node.mutex);
      EXPECT_TRUE(queue.hand_over.is_turn_of(first));
      GetParam() ? queue.hand_over.leave_turn() : queue.hand_over.take_turn_away();
      EXPECT_TRUE(queue.hand_over.is_idle());
    }
    std::thread([&] { queue.run(); }).join();
    queue.push("3");
  };
  for (const char* name : {"0", "1", "2"}) queue.push(name);
  queue.run();
  EXPECT_EQ(queue.heard->names, (Names{"0", "1", "2"})) << "whoever lost the turn hands nothing over";
  EXPECT_EQ(queue.num_posted, GetParam() ? 1 : 0);
  std::thread([&] { queue.run(); }).join();
  EXPECT_EQ(queue.heard->names, (Names{"0", "1", "2", "3"}));
}
INSTANTIATE_TEST_SUITE_P(Turns, HandOverTurnTest, testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "Leaves" : "IsReplaced"); });

TEST(HandOverTest, LeavingATurnThatAThreadDoesNotHaveChangesNothing) {
  Queue queue;
  queue.heard->on_event = [&](const std::string& name) {
    if (name != "0") return;
    std::thread([&] {
      const std::lock_guard lock(queue.node.mutex);
      queue.hand_over.leave_turn();
    }).join();
  };
  for (const char* name : {"0", "1"}) queue.push(name);
  queue.run();
  EXPECT_EQ(queue.heard->names, (Names{"0", "1"}));
  EXPECT_EQ(queue.num_posted, 0);
}

TEST(HandOverDeathTest, AFunctionThatThrowsEndsTheProcess) {
  Queue queue;
  queue.heard->on_event = [](const std::string&) { throw std::runtime_error("thrown by the handler"); };
  queue.push("message");
  EXPECT_DEATH(queue.run(), "thrown by the handler");
}

// stop() waits for that.
TEST(HandOverTest, AfterTheStopTheEndOfATurnIsNotified) {
  for (const bool leaves : {false, true}) {
    Queue queue;
    std::binary_semaphore is_in_function{0}, may_end{0}, may_return{0};
    queue.heard->on_event = [&](const std::string&) {
      is_in_function.release();
      may_end.acquire();
      if (!leaves) return;
      {
        const std::lock_guard lock(queue.node.mutex);
        queue.hand_over.leave_turn();
      }
      may_return.acquire();
    };
    queue.push("message");
    std::thread other([&] { queue.run(); });
    is_in_function.acquire();
    const base::Deadline deadline = cohort::test::patience();
    {
      std::unique_lock lock(queue.node.mutex);
      queue.node.is_stopped = true;
      may_end.release();
      EXPECT_TRUE(base::wait(queue.node.changed, lock, [&] { return queue.hand_over.is_idle(); }, deadline));
    }
    EXPECT_LT(deadline.elapsed(), std::chrono::seconds(20)) << leaves;
    may_return.release();
    other.join();
  }
}

}  // namespace
}  // namespace cohort::net::node_detail

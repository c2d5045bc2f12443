#include "cohort/net/internal/loop/node_thread.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>

#include "cohort/base/threads/wait.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"

namespace cohort::net::node_detail {
namespace {

using test::patience;

// Threads that do nothing until they are told to end.
struct HeldThreads : std::enable_shared_from_this<HeldThreads> {
  NodeThread::Body body() {
    return [self = shared_from_this()](int generation) {
      base::poll_until([&] { return self->looks[static_cast<std::size_t>(generation)].exchange(false); },
                       patience());
      self->is_own[static_cast<std::size_t>(generation)] = self->thread.is_here();
      {
        const std::lock_guard lock(self->node.mutex);
        self->num_elsewhere[static_cast<std::size_t>(generation)] = self->thread.num_replaced_elsewhere();
      }
      ++self->num_looked;
      base::poll_until([&] { return self->ends[static_cast<std::size_t>(generation)].load(); }, patience());
      ++self->num_ended;
    };
  }
  void start() {
    const std::lock_guard lock(node.mutex);
    thread.start(body());
  }
  bool replace() {
    const std::lock_guard lock(node.mutex);
    return thread.replace(body());
  }
  int num_replaced() {
    const std::lock_guard lock(node.mutex);
    return thread.num_replaced_elsewhere();
  }
  void look(std::size_t generation) {
    const int before = num_looked;
    looks[generation] = true;
    test::wait_until([&] { return num_looked > before; });
  }

  NodeLock node;
  NodeThread thread{node};
  std::array<std::atomic<bool>, 3> looks{}, ends{}, is_own{};  // by generation
  std::array<std::atomic<int>, 3> num_elsewhere{};
  std::atomic<int> num_looked{0}, num_ended{0};
};

TEST(NodeThreadTest, AThreadInAnothersPlaceIsTheNodesOwn) {
  const auto threads = std::make_shared<HeldThreads>();
  threads->start();
  EXPECT_FALSE(threads->thread.is_here());
  EXPECT_TRUE(threads->thread.is_current(1));
  EXPECT_EQ(threads->num_replaced(), 0);
  ASSERT_TRUE(threads->replace());
  EXPECT_FALSE(threads->thread.is_current(1));
  EXPECT_TRUE(threads->thread.is_current(2));
  EXPECT_EQ(threads->num_replaced(), 1);
  threads->look(1);
  threads->look(2);
  EXPECT_FALSE(threads->is_own[1]);
  EXPECT_TRUE(threads->is_own[2]);
  EXPECT_EQ(threads->num_elsewhere[1], 0) << "the thread that was replaced does not wait for itself";
  EXPECT_EQ(threads->num_elsewhere[2], 1);
  threads->ends[1] = true;
  EXPECT_TRUE(test::comes_true([&] { return threads->num_replaced() == 0; }));
  threads->ends[2] = true;
  std::unique_lock lock(threads->node.mutex);
  threads->thread.stop(lock, patience());
}

// While it lives no thread can be had: the address space has no room for its stack.
class NoThreads {
 public:
  NoThreads() {
    pthread_attr_t attributes;
    EXPECT_EQ(::pthread_getattr_default_np(&before_), 0);
    EXPECT_EQ(::pthread_attr_init(&attributes), 0);
    EXPECT_EQ(::pthread_attr_setstacksize(&attributes, std::size_t{1} << 52), 0);
    EXPECT_EQ(::pthread_setattr_default_np(&attributes), 0);
    ::pthread_attr_destroy(&attributes);
  }
  ~NoThreads() {
    EXPECT_EQ(::pthread_setattr_default_np(&before_), 0);
    ::pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

TEST(NodeThreadTest, WhereNoThreadCanBeHadTheOwnOneStays) {
  const auto threads = std::make_shared<HeldThreads>();
  threads->start();
  const std::thread::id own = threads->thread.id();
  {
    const NoThreads none;
    EXPECT_FALSE(threads->replace());
  }
  EXPECT_EQ(threads->thread.id(), own);
  EXPECT_TRUE(threads->thread.is_current(1));
  EXPECT_EQ(threads->num_replaced(), 0);
  threads->look(1);
  EXPECT_TRUE(threads->is_own[1]);
  ASSERT_TRUE(threads->replace()) << "another one may have room";
  EXPECT_TRUE(threads->thread.is_current(2));
  EXPECT_EQ(threads->num_replaced(), 1);
  threads->ends[1] = threads->ends[2] = true;
  threads->looks[2] = true;
  EXPECT_TRUE(test::comes_true([&] { return threads->num_replaced() == 0; }));
  std::unique_lock lock(threads->node.mutex);
  threads->thread.stop(lock, patience());
}

TEST(NodeThreadTest, StopWaitsForTheOwnThread) {
  const auto threads = std::make_shared<HeldThreads>();
  threads->start();
  threads->looks[1] = threads->ends[1] = true;
  std::unique_lock lock(threads->node.mutex);
  threads->thread.stop(lock, patience());
  EXPECT_TRUE(lock.owns_lock());
  EXPECT_EQ(threads->num_ended, 1);
  EXPECT_EQ(threads->thread.id(), std::thread::id());
}

TEST(NodeThreadTest, StopLeavesAThreadThatDoesNotEndInTime) {
  const auto threads = std::make_shared<HeldThreads>();
  threads->start();
  {
    std::unique_lock lock(threads->node.mutex);
    threads->thread.stop(lock, base::Deadline(std::chrono::milliseconds(20)));
  }
  EXPECT_EQ(threads->num_ended, 0);
  threads->looks[1] = threads->ends[1] = true;
  EXPECT_TRUE(test::comes_true([&] { return threads->num_ended == 1; }));
}

TEST(NodeThreadTest, AThreadThatStopsTheNodeDoesNotWaitForItself) {
  const auto threads = std::make_shared<HeldThreads>();
  std::atomic<bool> is_over{false};
  {
    const std::lock_guard lock(threads->node.mutex);
    threads->thread.start([threads, &is_over](int) {
      std::unique_lock inner(threads->node.mutex);
      threads->thread.stop(inner, patience());
      is_over = true;
    });
  }
  EXPECT_TRUE(test::comes_true([&] { return is_over.load(); }));
}

}  // namespace
}  // namespace cohort::net::node_detail

// Stores that answer late or not at all, and threads that ask one at the same time.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "cohort/base/error.h"
#include "cohort/base/timeline.h"
#include "cohort/comm/desync.h"
#include "cohort/comm/group.h"
#include "cohort/comm/internal/consistency_check.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/internal/tcp_store.h"
#include "cohort/comm/trace.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/gate.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::wait_until;

// A store in a process of its own, which is stopped.
class StoppedStore {
 public:
  StoppedStore() {
    int port[2];
    if (::pipe(port) != 0) throw std::runtime_error("no pipe");
    child_ = ::fork();
    if (child_ == 0) {
      const auto store = open_tcp_store({.host = "127.0.0.1", .serves = true, .is_local = true});
      const int number = store->getPort();
      [[maybe_unused]] const ssize_t ignored = ::write(port[1], &number, sizeof(number));
      for (;;) ::pause();
    }
    int number = 0;
    if (::read(port[0], &number, sizeof(number)) != sizeof(number)) throw std::runtime_error("no port");
    ::close(port[0]);
    ::close(port[1]);
    port_ = static_cast<std::uint16_t>(number);
  }
  ~StoppedStore() {
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }
  std::uint16_t port() const { return port_; }
  void stop() const {
    ::kill(child_, SIGSTOP);
    int status = 0;
    ::waitpid(child_, &status, WUNTRACED);
  }

 private:
  pid_t child_ = -1;
  std::uint16_t port_ = 0;
};

c10::intrusive_ptr<DeadlineStore> open(std::uint16_t port) {
  return c10::make_intrusive<DeadlineStore>(open_tcp_store({.host = "127.0.0.1", .port = port}),
                                            "the store of the test");
}

TEST(DeadlineStoreTest, ASilentStoreIsAnErrorAtTheDeadlineOfEachRequest) {
  const StoppedStore host;
  const std::vector<std::function<void(c10d::Store&)>> requests = {
      [](c10d::Store& store) {
        store.set("key", "value");
        store.get_to_str("key");
      },
      [](c10d::Store& store) { store.get("other"); },
      [](c10d::Store& store) { store.check({"key"}); },
      [](c10d::Store& store) { store.add("count", 1); },
      [](c10d::Store& store) { store.wait({"other"}, milliseconds(1000)); },
      [](c10d::Store& store) { store.multiGet({"key"}); },
      [](c10d::Store& store) { store.deleteKey("key"); },
      [](c10d::Store& store) { store.clone(); },
  };
  std::vector<c10::intrusive_ptr<DeadlineStore>> stores;
  for (std::size_t i = 0; i < 2 * requests.size(); ++i) {
    stores.push_back(open(host.port()));
    stores.back()->setTimeout(milliseconds(1000));
  }
  stores[0]->set("known", "word");
  EXPECT_EQ(stores[1]->get_to_str("known"), "word");
  COHORT_EXPECT_THROW_WITH(stores[0]->wait({"unknown"}, milliseconds(50)), c10::Error, "imeout");
  host.stop();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const base::Deadline waited(seconds(60));
    EXPECT_THROW(requests[i](*stores[2 * i]), TimeoutError) << i;
    EXPECT_LT(waited.elapsed(), seconds(10)) << i;
    const base::Deadline again(seconds(60));
    const StoreDeadline until(base::Deadline(milliseconds(200)));
    EXPECT_THROW(requests[i](*stores[2 * i + 1]), TimeoutError) << i;
    EXPECT_LT(again.elapsed(), milliseconds(1200)) << i;
  }
  const base::Deadline at_once(seconds(60));
  COHORT_EXPECT_THROW_WITH(stores[3]->check({"known"}), TimeoutError,
                           "the store of the test has not answered");
  EXPECT_LT(at_once.elapsed(), milliseconds(900)) << "it was silent before";
}

// A store that takes its time for one key: until the gate is open.
class SlowStore : public c10d::HashStore {
 public:
  using HashStore::wait;
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    if (keys.front() == "slow") return pass();
    HashStore::wait(keys, timeout);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    if (key == "slow") pass();
    return HashStore::add(key, value);
  }
  test::Gate entered, gate;

 private:
  void pass() {
    entered.open();
    gate.wait();
  }
};

TEST(DeadlineStoreTest, WhoWaitsForAnotherThreadsRequestEndsAtItsDeadlineAndTheStoreIsNotSilent) {
  const auto slow = c10::make_intrusive<SlowStore>();
  const auto store = c10::make_intrusive<DeadlineStore>(slow, "a slow store");
  std::thread other([&] { EXPECT_EQ(store->add("slow", 1), 1); });
  slow->entered.wait();
  const base::Deadline waited(seconds(60));
  {
    const StoreDeadline until(base::Deadline(milliseconds(150)));
    COHORT_EXPECT_THROW_WITH(store->check({"key"}), TimeoutError,
                             "before a slow store could be asked (check), busy with another request: add");
  }
  EXPECT_LT(waited.elapsed(), seconds(10));
  slow->gate.open();
  other.join();
  EXPECT_EQ(store->add("count", 2), 2) << "it has answered in time";
}

TEST(DeadlineStoreTest, ADeadlineThatHasPassedSaysNothingOfTheStore) {
  const auto slow = c10::make_intrusive<SlowStore>();
  const auto store = c10::make_intrusive<DeadlineStore>(slow, "the store of the test");
  {
    const StoreDeadline until(base::Deadline(milliseconds(0)));
    EXPECT_THROW(store->add("count", 1), TimeoutError);
  }
  EXPECT_EQ(store->add("count", 1), 1) << "nor was it asked";
  {
    const StoreDeadline until(base::Deadline(milliseconds(100)));
    EXPECT_THROW(store->wait({"slow"}, seconds(60)), TimeoutError);
  }
  std::thread opens([&] {
    std::this_thread::sleep_for(milliseconds(50));
    slow->gate.open();
  });
  EXPECT_EQ(store->add("count", 1), 2) << "once the wait is over";
  opens.join();
}

// Its thread may begin late on a busy host.
TEST(DeadlineStoreTest, AStoreIsMadeByTheDeadlineOfTheCaller) {
  const auto kept = c10::make_intrusive<SlowStore>();
  const StoreDeadline until(base::Deadline(milliseconds(0)));
  COHORT_EXPECT_THROW_WITH(c10::make_intrusive<DeadlineStore>(kept, "the store of the test"), TimeoutError,
                           "ms for the thread of a store to begin");
  EXPECT_EQ(kept.use_count(), 1);
}

struct CountingStore : c10d::HashStore {
  bool check(const std::vector<std::string>& keys) override {
    ++num_checks;
    return HashStore::check(keys);
  }
  std::atomic<int> num_checks{0};
};

// As LibTorch's own wait, whichever store it is.
TEST(DeadlineStoreTest, ATimeoutOfZeroIsNoneWhereTheStoreIsAsked) {
  const auto counting = c10::make_intrusive<CountingStore>();
  const auto store = c10::make_intrusive<DeadlineStore>(counting, "the store of the test",
                                                        DeadlineStore::Waiting::kByAsking);
  std::thread waiter([&] { EXPECT_NO_THROW(store->wait({"key"}, c10d::Store::kNoTimeout)); });
  wait_until([&] { return counting->num_checks > 1; });
  store->set("key", "value");
  waiter.join();
  const StoreDeadline until(base::Deadline(milliseconds(2)));
  COHORT_EXPECT_THROW_WITH(store->wait({"never"}, c10d::Store::kNoTimeout), TimeoutError, "");
}

TEST(DeadlineStoreTest, LeavesNothingInTheTimeline) {
  base::Timeline::start();
  const auto store =
      c10::make_intrusive<DeadlineStore>(c10::make_intrusive<SlowStore>(), "the store of the test");
  EXPECT_FALSE(store->check({"key"}));
  base::Timeline::stop();
  const std::string trace = base::Timeline::json();
  EXPECT_EQ(trace.find("\"check\""), std::string::npos);
  EXPECT_EQ(trace.find("\"store\""), std::string::npos);
}

TEST(DeadlineStoreTest, ManyThreadsAskAndEachGetsItsAnswer) {
  const auto store =
      c10::make_intrusive<DeadlineStore>(c10::make_intrusive<SlowStore>(), "the store of the test");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 200; ++k) EXPECT_GT(store->add("count", 1), k);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store->add("count", 0), 800);
}

// The thread that is left behind closes the store once the request has ended.
TEST(DeadlineStoreTest, ARequestThatHangsDoesNotHoldTheEndOfTheStore) {
  const auto slow = c10::make_intrusive<SlowStore>();
  const base::Deadline waited(seconds(60));
  {
    const auto store = c10::make_intrusive<DeadlineStore>(slow, "a store that hangs");
    const StoreDeadline until(base::Deadline(milliseconds(100)));
    EXPECT_THROW(store->add("slow", 1), TimeoutError);
  }
  EXPECT_LT(waited.elapsed(), milliseconds(100) + test::deadline_slack());
  EXPECT_EQ(slow.use_count(), 2);
  slow->gate.open();
  wait_until([&] { return slow.use_count() == 1; });
}

TEST(DeadlineStoreTest, IsClosedByItsThreadSoonAfterItsEnd) {
  const auto kept = c10::make_intrusive<SlowStore>();
  for (int i = 0; i < 100; ++i) {
    const auto store = c10::make_intrusive<DeadlineStore>(kept, "the store of the test");
    EXPECT_EQ(store->add("count", 1), i + 1);
  }
  wait_until([&] { return kept.use_count() == 1; });
}

// Each on a thread of its own, over one connection for what does not wait.
TEST(SilentStoreTest, BarriersOfTwoGroupsDoNotWaitForEachOther) {
  const auto server = open_tcp_store({.host = "127.0.0.1", .serves = true, .is_local = true});
  std::atomic<bool> has_ended{false};  // the second barrier
  const auto run = [&](int rank) {
    const Group group =
        make_group(open(static_cast<std::uint16_t>(server->getPort())), rank, 2, "shm", seconds(10));
    const Group first = group.subgroup({0, 1}), second = group.subgroup({0, 1});
    if (rank == 1) {
      wait_until([&] { return has_ended.load(); });
      return first.barrier();
    }
    std::thread long_one([&] { EXPECT_NO_THROW(first.barrier({seconds(10)})); });
    std::this_thread::sleep_for(milliseconds(100));
    const base::Deadline waited(seconds(60));
    COHORT_EXPECT_THROW_WITH(second.barrier({milliseconds(300)}), TimeoutError, "rank 1 has not come");
    EXPECT_LT(waited.elapsed(), seconds(5));
    has_ended = true;
    long_one.join();
  };
  std::thread other([&] { EXPECT_NO_THROW(run(1)); });
  run(0);
  other.join();
}

// As a group for GPUs compares. Rank 0 waits at the barrier while the comparison of its call waits.
TEST(SilentStoreTest, AComparisonOverTheStoreContinuesBesideABarrier) {
  const auto server = open_tcp_store({.host = "127.0.0.1", .serves = true, .is_local = true});
  const auto run = [&](int rank) {
    const Group group =
        make_group(open(static_cast<std::uint16_t>(server->getPort())), rank, 2, "shm", seconds(4));
    Group::State& state = *group.shared_state();
    state.device = c10::kCUDA;
    std::atomic<bool> is_at_barrier{false};
    if (rank == 0) {
      state.enqueue([&] {
        wait_until([&] { return is_at_barrier.load(); });
        std::this_thread::sleep_for(milliseconds(200));
      });
    }
    at::Tensor tensor = at::ones({3});
    Pending pending = group.all_reduce(tensor);
    if (rank == 1) pending.wait();
    is_at_barrier = true;
    group.barrier();
    pending.wait();
    EXPECT_EQ(tensor[0].item<int>(), 2);
    state.device = c10::kCPU;
  };
  std::thread other([&] { EXPECT_NO_THROW(run(1)); });
  EXPECT_NO_THROW(run(0));
  other.join();
}

// Each in a group of its own, as a store that was silent once is not asked again.
TEST(SilentStoreTest, IsATimeoutOfEveryCallThatAsksIt) {
  constexpr milliseconds kTimeout(1500);
  const std::filesystem::path trace =
      std::filesystem::temp_directory_path() / base::concat("silent_store_", ::getpid(), ".json");
  const std::vector<std::pair<std::string, std::function<void(Group&)>>> calls = {
      {"barrier", [](Group& group) { group.barrier(); }},
      {"comparison",
       [](Group& group) {
         group.shared_state()->device = c10::kCUDA;
         at::Tensor tensor = at::ones({3});
         group.all_reduce(tensor).wait();
       }},
      {"subgroup", [](Group& group) { group.subgroup({0, 1}); }},
      {"trace", [&](Group& group) { write_trace(group, trace); }},
  };
  const StoppedStore host;
  std::atomic<int> ready{0};
  std::atomic<bool> is_stopped{false};
  std::vector<std::thread> threads;
  for (const auto& [name, call] : calls) {
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank, name = name, call = call] {
        const auto store = c10::make_intrusive<c10d::PrefixStore>(name, open(host.port()));
        Group group = make_group(store, rank, 2, "shm", seconds(20));
        group.shared_state()->timeout = kTimeout;
        ++ready;
        wait_until([&] { return is_stopped.load(); });
        const base::Deadline waited(seconds(60));
        EXPECT_THROW(call(group), TimeoutError) << name << ", rank " << rank;
        EXPECT_LT(waited.elapsed(), kTimeout + test::deadline_slack()) << name << ", rank " << rank;
      });
    }
  }
  wait_until([&] { return ready.load() == 8; });
  host.stop();
  is_stopped = true;
  for (std::thread& thread : threads) thread.join();
}

// It answers as the call begins, which waits for a rank that does not come.
TEST(SilentStoreTest, ThatFallsSilentDuringAWaitIsATimeoutAtTheDeadlineOfTheCall) {
  static constexpr milliseconds kTimeout(1000);
  const std::vector<std::pair<std::string, std::function<void(const Group&)>>> calls = {
      {"barrier", [](const Group& group) { group.barrier({kTimeout}); }},
      {"subgroup", [](const Group& group) { group.subgroup({0, 1}, {.timeout = kTimeout}); }},
      {"comparison",
       [](const Group& group) {
         gather_over_store(*group.shared_state(), Fingerprint(), base::Deadline(kTimeout));
       }},
      {"trace", [](const Group& group) { write_trace(group, "/dev/null", {.timeout = kTimeout}); }},
  };
  const StoppedStore host;
  std::atomic<std::size_t> waiting{0};
  std::vector<std::thread> threads;
  for (const auto& [name, call] : calls) {
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank, name = name, call = call] {
        const auto store = c10::make_intrusive<c10d::PrefixStore>(name, open(host.port()));
        const Group group = make_group(store, rank, 2, "shm", seconds(20));
        if (rank == 1) return wait_until([&] { return waiting.load() == 2 * calls.size(); });
        ++waiting;
        const base::Deadline waited(kTimeout);
        EXPECT_THROW(call(group), Error) << name;
        EXPECT_LT(waited.elapsed(), kTimeout + test::deadline_slack()) << name;
        ++waiting;
      });
    }
  }
  const Group watched = make_group(open(host.port()), 0, 1, "shm", seconds(20));
  std::optional<DesyncWatch> watch = watch_for_desync(watched);
  wait_until([&] { return waiting.load() == calls.size(); });
  std::this_thread::sleep_for(milliseconds(300));
  host.stop();
  // The watch has 3.5 s to say that this rank leaves.
  const base::Deadline waited(milliseconds(3500));
  watch.reset();
  EXPECT_LT(waited.elapsed(), milliseconds(3500) + test::deadline_slack());
  for (std::thread& thread : threads) thread.join();
}

// A store whose wait is over just as the last rank comes.
class LateStore : public c10d::HashStore {
 public:
  using HashStore::wait;
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    if (!keys.front().ends_with("made/open")) return HashStore::wait(keys, timeout);
    std::this_thread::sleep_for(timeout);
    throw std::runtime_error("wait timed out");
  }
};

TEST(SilentStoreTest, AGroupIsMadeWhereTheLastRankCameInTheLastMoment) {
  const auto store = c10::make_intrusive<LateStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back(
        [&, rank] { EXPECT_NO_THROW(make_group(store, rank, 2, "shm", milliseconds(1500))); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace cohort::comm

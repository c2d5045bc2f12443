// Ranks that fail, or stand still, as a group is made.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <string_view>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/comm/backends/shm/internal/communicator.h"
#include "tests/comm/shm/ranks.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/throws.h"

namespace cohort::comm::shm {
namespace {

// Each rank has made its connections, and comes to a step and no further.
TEST(ShmMakingTest, ARankThatStandsStillAtAStepOfMakingTheGroupIsNamed) {
  constexpr milliseconds kTime(700);
  for (const int stopped : {0, 1}) {
    for (const bool has_shared : {false, true}) {
      if (stopped == 1 && has_shared) continue;  // rank 0 makes the memory
      SCOPED_TRACE(base::concat("rank ", stopped, has_shared ? " has shared the memory" : ""));
      MapStore kv_store;
      std::atomic<bool> is_over{false};
      std::thread other([&] {
        const PeerConnections connections(kv_store, stopped, 2, base::Deadline(seconds(20)));
        const std::size_t bytes = Communicator::segment_bytes(2);
        if (has_shared) connections.send(1, base::SharedMemory::create("comm.shm", bytes, false).fd(), 0);
        EXPECT_TRUE(test::comes_true([&] { return is_over.load(); }));
      });
      EXPECT_TRUE(test::comes_true([&] { return kv_store.has(base::concat("contact/", stopped)); }));
      const base::Deadline waited(kTime);
      COHORT_EXPECT_THROW_WITH(Communicator(kv_store, 1 - stopped, 2, base::Deadline(kTime)), TimeoutError,
                               base::concat("rank ", stopped));
      EXPECT_LT(waited.elapsed(), kTime + test::deadline_slack());
      is_over = true;
      other.join();
    }
  }
}

// Rank 0 is played: it has come to the first round, and goes no further.
TEST(ShmMakingTest, AGroupIsMadeInOneRound) {
  MapStore kv_store;
  std::thread other([&] {
    const PeerConnections connections(kv_store, 0, 2, base::Deadline(seconds(20)));
    const base::SharedMemory memory =
        base::SharedMemory::create("comm.shm", Communicator::segment_bytes(2), false);
    // Its count of rounds, and what it calls in the rounds with even and with odd numbers.
    auto* const words = reinterpret_cast<std::uint64_t*>(memory.data());
    words[3] = Signature{.type = CollectiveType::kRendezvous}.pack();
    words[0] = 1;
    connections.send(1, memory.fd(), 0);
  });
  EXPECT_NO_THROW(Communicator(kv_store, 1, 2, base::Deadline(seconds(20))));
  other.join();
}

/// Holds rank 0, once it has said where it is, until `is_open`.
class HeldStore : public MapStore {
 public:
  void set(const std::string& key, const std::string& value) override {
    MapStore::set(key, value);
    if (key == "contact/0") test::wait_until([this] { return is_open.load(); });
  }
  std::atomic<bool> is_open{false};
};

// Rank 1 is played: it has connected, and looks into the memory that all share.
TEST(ShmMakingTest, ARankThatCannotMakeTheGroupTellsTheOthersWhy) {
  HeldStore kv_store;
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    const PeerConnections connections(kv_store, 1, 2, base::Deadline(seconds(20)));
    kv_store.is_open = true;
    EXPECT_TRUE(test::comes_true([&] { return is_over.load(); }));
    const auto received = connections.receive(0);
    ASSERT_TRUE(received);
    const base::SharedMemory memory = base::SharedMemory::map("comm.shm", received->second);
    const std::string_view bytes(reinterpret_cast<const char*>(memory.data()), memory.size());
    EXPECT_NE(bytes.find("ms for rank 1 of the group"), std::string_view::npos);
  });
  COHORT_EXPECT_THROW_WITH(Communicator(kv_store, 0, 2, base::Deadline(milliseconds(0))), TimeoutError,
                           "ms for rank 1 of the group");
  is_over = true;
  other.join();
}

/// No file, and so no memory that has no name either, may become larger while this lives.
class NoLargeFiles {
 public:
  NoLargeFiles() : before_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &limit_);
    rlimit small = limit_;
    small.rlim_cur = Communicator::segment_bytes(2) - 1;
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  ~NoLargeFiles() {
    ::setrlimit(RLIMIT_FSIZE, &limit_);
    ::signal(SIGXFSZ, before_);
  }
  NoLargeFiles(const NoLargeFiles&) = delete;
  NoLargeFiles& operator=(const NoLargeFiles&) = delete;

 private:
  void (*before_)(int);
  rlimit limit_{};
};

TEST(ShmMakingTest, ARankThatHasNoMemoryForTheGroupTellsTheOthersSo) {
  const NoLargeFiles limited;
  MapStore kv_store;
  std::thread first([&] {
    COHORT_EXPECT_THROW_WITH(Communicator(kv_store, 0, 2, base::Deadline(seconds(20))), SystemError,
                             "cannot size shared memory");
  });
  COHORT_EXPECT_THROW_WITH(Communicator(kv_store, 1, 2, base::Deadline(seconds(20))), PeerError,
                           "rank 0 gave up: [comm.shm] cannot size shared memory");
  first.join();
}

// Each rank is played in turn. Rank 0 hands over memory of another size, and rank 1 cannot map it.
TEST(ShmMakingTest, ARankThatCannotUseTheMemoryTellsTheOthersSo) {
  MapStore kv_store;
  std::thread first([&] {
    const PeerConnections connections(kv_store, 0, 2, base::Deadline(seconds(20)));
    connections.send(1, base::SharedMemory::create("comm.shm", 4096, false).fd(), 0);
    EXPECT_TRUE(test::comes_true([&] { return !connections.why_gone(1).empty(); }));
    EXPECT_TRUE(kv_store.has("not made/1")) << "it is said before the connection is closed";
  });
  COHORT_EXPECT_THROW_WITH(Communicator(kv_store, 1, 2, base::Deadline(seconds(20))), CommError,
                           "another version of this backend");
  first.join();

  MapStore second_store;
  std::thread second([&] {
    const PeerConnections connections(second_store, 1, 2, base::Deadline(seconds(20)));
    EXPECT_TRUE(test::comes_true([&] { return connections.receive(0).has_value(); }));
    second_store.set("not made/1", "it cannot map that");
  });
  COHORT_EXPECT_THROW_WITH(Communicator(second_store, 0, 2, base::Deadline(seconds(20))), PeerError,
                           "rank 1 gave up: it cannot map that while the group was made");
  second.join();
}

}  // namespace
}  // namespace cohort::comm::shm

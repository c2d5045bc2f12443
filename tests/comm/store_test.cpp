// What groups ask of the store: how often, for how long, and what they leave there.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "cohort/base/error.h"
#include "cohort/comm/internal/consistency_check.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/internal/pending_state.h"
#include "cohort/comm/internal/tcp_store.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/ranks.h"
#include "tests/support/stores/hooked_store.h"
#include "tests/support/throws.h"

namespace {

std::atomic<int> names_asked{0};

}  // namespace

// Stands before that of the C library, and asks no name server.
extern "C" __attribute__((visibility("default"))) int getnameinfo(const sockaddr* address, socklen_t size,
                                                                  char* host, socklen_t host_size,
                                                                  char* service, socklen_t service_size,
                                                                  int flags) {
  static const auto real = reinterpret_cast<decltype(&::getnameinfo)>(::dlsym(RTLD_NEXT, "getnameinfo"));
  if ((flags & NI_NUMERICHOST) == 0) ++names_asked;
  return real(address, size, host, host_size, service, service_size, flags | NI_NUMERICHOST);
}

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::run_ranks;

constexpr int kRanks = 8;

// Runs body on each rank of a group over a store that counts; `keeper`: rank 0's process keeps the store.
void run_counted(bool keeper, const std::function<void(Group&, std::atomic<int>&, c10d::Store&)>& body) {
  const auto requests = std::make_shared<std::atomic<int>>(0);
  const auto hash = c10::make_intrusive<c10d::HashStore>();
  const c10::intrusive_ptr<c10d::Store> store =
      c10::make_intrusive<test::HookedStore>(hash, [requests] { ++*requests; });
  const base::Deadline since(seconds(20));
  std::barrier all(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      Group group(make_state({.store = store,
                              .job_ranks = all_ranks(kRanks),
                              .rank = rank,
                              .backend = "shm",
                              .timeout = seconds(20),
                              .is_kept_by_rank = keeper}));
      all.arrive_and_wait();
      if (rank == 0) {
        // Who waits for the others over shm asks again after 1 ms, 2 ms, 4 ms.
        const auto took = std::chrono::duration_cast<milliseconds>(since.elapsed()).count();
        EXPECT_LE(requests->load(), 8 * kRanks + kRanks * took / 4) << took << " ms";
      }
      all.arrive_and_wait();
      body(group, *requests, *hash);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(StoreTest, ABarrierAndAComparisonTakeAFewRequestsARank) {
  constexpr int kBarriers = 50;
  std::atomic<int> after_making{0};
  run_counted(false, [&](Group& group, std::atomic<int>& requests, c10d::Store& /*store*/) {
    at::Tensor here = at::ones({1});
    group.all_reduce(here).wait();  // all have it
    if (group.rank() == 0) {
      after_making = requests.load();
    }
    group.all_reduce(here).wait();
    for (int i = 0; i < kBarriers; ++i) group.barrier();
    group.all_reduce(here).wait();
    if (group.rank() == 0) {
      EXPECT_LE(requests.load() - after_making.load(), kBarriers * (2 * kRanks + 3));
      after_making = requests.load();
    }
    group.all_reduce(here).wait();
    for (int i = 0; i < 10; ++i) {
      gather_over_store(*group.shared_state(), Fingerprint(), base::Deadline(seconds(20)));
    }
    group.all_reduce(here).wait();
    if (group.rank() == 0) {
      EXPECT_LE(requests.load() - after_making.load(), 10 * (4 * kRanks + 2));
    }
    group.all_reduce(here).wait();
  });
}

TEST(StoreTest, AThousandBarriersLeaveNothing) {
  for (const bool keeper : {false, true}) {
    run_counted(keeper, [&](Group& group, std::atomic<int>& /*requests*/, c10d::Store& store) {
      at::Tensor here = at::ones({1});
      group.barrier();
      group.all_reduce(here).wait();
      const std::int64_t before = store.getNumKeys();
      group.all_reduce(here).wait();
      for (int i = 0; i < 1000; ++i) group.barrier();
      group.all_reduce(here).wait();
      EXPECT_EQ(store.getNumKeys(), before) << "those of the last one";
      group.all_reduce(here).wait();
    });
  }
}

// A group without the rank that keeps the store has nobody to take what it leaves away.
TEST(StoreTest, BarriersOfASubgroupWithoutRank0LeaveNothing) {
  run_counted(true, [&](Group& group, std::atomic<int>& /*requests*/, c10d::Store& store) {
    const Group pair = group.subgroup({1, 2});
    const auto count = [&] {
      at::Tensor here = at::ones({1});
      group.all_reduce(here).wait();
      const std::int64_t keys = store.getNumKeys();
      group.all_reduce(here).wait();
      return keys;
    };
    if (pair) pair.barrier();
    const std::int64_t before = count();
    for (int i = 0; pair && i < 100; ++i) pair.barrier();
    EXPECT_EQ(count(), before) << "those of the last one";
  });
}

// It has come to the barrier, and died.
TEST(StoreTest, TheRankThatKeepsTheStoreWaitsSomeSecondsForOneThatDied) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<bool> is_over{false};
  const auto make = [&](int rank) {
    return Group(make_state(
        {.store = store, .job_ranks = all_ranks(2), .rank = rank, .backend = "shm", .timeout = seconds(20)}));
  };
  std::thread other([&] {
    const Group group = make(1);
    StoreAdapter kv_store = store_adapter_of(*group.shared_state());
    base::StoreBarrier(kv_store, "barrier/0", 1, 2).arrive();
    while (!is_over.load()) std::this_thread::sleep_for(milliseconds(5));
  });
  const Group group = make(0);
  const base::Deadline waited(seconds(60));
  group.barrier();
  EXPECT_LT(waited.elapsed(), seconds(6));
  is_over = true;
  other.join();
}

// Also over a store that is asked for each word: that a rank does not come is not the store's silence.
TEST(StoreTest, WhoIsMissingIsNamedAtTheDeadline) {
  const auto server = open_tcp_store({.host = "127.0.0.1", .serves = true, .is_local = true});
  constexpr milliseconds kTime(1000);
  std::barrier both(2);  // ranks 0 and 2 begin each call together
  std::atomic<int> num_over{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const auto store = c10::make_intrusive<DeadlineStore>(
          open_tcp_store({.host = "127.0.0.1", .port = static_cast<std::uint16_t>(server->getPort())}),
          "the store of the test");
      const Group group =
          make_group(store, rank, 3, "gloo", seconds(20), "127.0.0.1", ConsistencyCheck::kOff);
      if (rank == 1) return test::wait_until([&] { return num_over == 2; });
      both.arrive_and_wait();
      const base::Deadline waited(kTime);
      COHORT_EXPECT_THROW_WITH(group.barrier({kTime}), TimeoutError, "rank 1 has not come");
      EXPECT_LT(waited.elapsed(), kTime + test::deadline_slack());
      at::Tensor tensor = at::ones({10});
      both.arrive_and_wait();
      COHORT_EXPECT_THROW_WITH(group.all_reduce(tensor, ReduceOp::SUM, {kTime}).wait(), Error,
                               "rank 1 of 3 did not notice");
      ++num_over;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Several collectives in flight when a peer goes.
TEST(StoreTest, ManyCallsInFlightFailTogether) {
  for (const std::string backend : {"shm", "gloo"}) {
    for (const ConsistencyCheck check : {ConsistencyCheck::kOff, ConsistencyCheck::kAlways}) {
      SCOPED_TRACE(base::concat(backend, check == ConsistencyCheck::kOff ? "" : ", compared"));
      std::array<base::Deadline::Clock::duration, 2> took{};
      run_ranks(
          3, backend,
          [&](Group& group) {
            if (group.rank() == 2) return;
            std::vector<at::Tensor> tensors;
            std::vector<Pending> pending;
            for (int i = 0; i < 8; ++i) tensors.push_back(at::ones({50'000}));
            const base::Deadline waited(seconds(60));
            try {
              for (at::Tensor& tensor : tensors) pending.push_back(group.all_reduce(tensor));
            } catch (const Error&) {  // the group is broken already
            }
            for (Pending& each : pending) EXPECT_THROW(each.wait(), Error);
            took[static_cast<std::size_t>(group.rank())] = waited.elapsed();
          },
          seconds(6), check);
      EXPECT_LT(std::min(took[0], took[1]), seconds(4));
      // Gloo's threads may be in different calls, each waiting for the other rank's, which has failed there:
      // until the deadline. The end of a process closes its connections; these ranks are threads of one.
      const bool may_wait_for_each_other = backend == "gloo" && check == ConsistencyCheck::kOff;
      EXPECT_LT(std::max(took[0], took[1]), may_wait_for_each_other ? seconds(9) : seconds(4));
    }
  }
}

// As NCCL's: what it throws out of a call means that ranks no longer agree.
class ThrowingBackend : public c10d::Backend {
 public:
  ThrowingBackend() : Backend(0, 1) {}
  const std::string getBackendName() const override { return "throwing"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    C10_THROW_ERROR(DistBackendError, "NCCL error: remote process exited");
  }
};

TEST(StoreTest, ABackendThatFailsWithinACallBreaksTheGroup) {
  Group group = make_group(c10::make_intrusive<c10d::HashStore>(), 0, 1, "gloo", seconds(20));
  group.process_group()->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                                    c10::make_intrusive<ThrowingBackend>());
  group.process_group()->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  at::Tensor tensor = at::ones({2});
  COHORT_EXPECT_THROW_WITH(group.all_reduce(tensor), CommError, "remote process exited");
  COHORT_EXPECT_THROW_WITH(group.all_reduce(tensor), CommError, "failed before and cannot be used");
}

// Its words may quote another rank's.
TEST(StoreTest, AnErrorKeepsItsTypeWhateverItSays) {
  EXPECT_THROW(throw_translated(PeerError("shm", "rank 0 gave up: timed out"), "here", "a call"), PeerError);
  EXPECT_THROW(throw_translated(TimeoutError("shm", "closed by peer"), "here", "a call"), TimeoutError);
  EXPECT_THROW(throw_translated(std::runtime_error("timed out"), "here", "a call"), TimeoutError);
  EXPECT_THROW(throw_translated(std::runtime_error("closed by peer"), "here", "a call"), PeerError);
}

TEST(StoreTest, ASubgroupMayHaveABackendOfItsOwn) {
  run_ranks(3, "gloo", [](Group& group) {
    const Group pair = group.subgroup({0, 2}, {.backend = "shm"});
    if (group.rank() == 1) return;
    EXPECT_EQ(pair.backend(), "shm");
    at::Tensor tensor = at::ones({1});
    pair.all_reduce(tensor).wait();
    EXPECT_EQ(tensor.item<float>(), 2);
  });
}

TEST(NumericNamesTest, AStoreAsksForNoNames) {
  names_asked = 0;
  const auto store = open_tcp_store({.host = "127.0.0.1", .serves = true});
  store->clone()->set("key", "value");
  EXPECT_EQ(names_asked.load(), 0);
}

TEST(NumericNamesTest, NorDoesOneThatTheUserOpensOnceAGroupIsMade) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const Group group = make_group(store, 0, 1, "gloo", seconds(20), "127.0.0.1");
  names_asked = 0;
  store->clone()->set("key", "value");
  EXPECT_EQ(names_asked.load(), 0);
}

}  // namespace
}  // namespace cohort::comm

#include "cohort/comm/group_owner.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/comm/failed_call.h"
#include "cohort/comm/init.h"
#include "cohort/comm/internal/backend.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/text_collectives.h"
#include "tests/support/comes_true.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

struct EndOfOwner : CommError {
  using CommError::CommError;
};

struct OwnerOfTest : GroupOwner {
  std::exception_ptr end() const override {
    return has_ended ? std::make_exception_ptr(EndOfOwner("test", "the owner has ended")) : nullptr;
  }
  std::exception_ptr wait_for_end() const override {
    ++num_waits;
    if (on_wait) on_wait();
    return end();
  }
  std::exception_ptr give_up(const std::vector<int>& ranks, base::Deadline,
                             const std::string& where) override {
    given_up = ranks;
    waited_in = where;
    has_ended = true;
    return end();
  }
  std::vector<int> given_up;
  std::string waited_in;
  std::atomic<bool> has_ended{false};
  mutable std::atomic<int> num_waits{0};
  std::function<void()> on_wait;
};

/// Two ranks, which are threads. Each has an owner of its own.
struct OwnedGroups {
  OwnedGroups() = default;
  explicit OwnedGroups(const std::string& backend) {
    std::thread other([&] { groups[1] = make(1, backend); });
    groups[0] = make(0, backend);
    other.join();
  }
  Group make(int rank, const std::string& backend) {
    return join_process_group({.store = store,
                               .where = "a store of the test",
                               .rank = rank,
                               .size = 2,
                               .name = "owned",
                               .backend = backend,
                               .timeout = timeout,
                               .check_consistency = ConsistencyCheck::kOff,
                               .owner = owners[static_cast<std::size_t>(rank)]});
  }
  milliseconds timeout{20'000};
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::shared_ptr<OwnerOfTest>> owners{std::make_shared<OwnerOfTest>(),
                                                   std::make_shared<OwnerOfTest>()};
  std::vector<Group> groups{2};
};

void sum_ones(const Group& group, milliseconds timeout = milliseconds(0)) {
  at::Tensor ones = at::ones({100});
  group.all_reduce(ones, ReduceOp::SUM, {.timeout = timeout}).wait();
}

TEST(GroupOwnerTest, CallsThatAreUnderWayThrowItsError) {
  for (const char* const backend : {"shm", "gloo"}) {
    for (const bool is_subgroup : {false, true}) {
      SCOPED_TRACE(backend);
      OwnedGroups ranks(backend);
      EXPECT_EQ(ranks.groups[0].name(), "owned");
      Group waiting = ranks.groups[0], peer;
      if (is_subgroup) {
        std::thread other([&] { peer = ranks.groups[1].subgroup({0, 1}); });
        waiting = ranks.groups[0].subgroup({0, 1});
        other.join();
      }
      std::atomic<bool> waits{false};
      std::thread waiter([&] {
        waits = true;
        COHORT_EXPECT_THROW_WITH(sum_ones(waiting), EndOfOwner, "the owner has ended");
      });
      test::wait_until([&] { return waits.load(); });
      ranks.owners[0]->has_ended = true;
      end_calls(ranks.groups[0]);
      waiter.join();
      COHORT_EXPECT_THROW_WITH(sum_ones(ranks.groups[0]), EndOfOwner, "the owner has ended");
      COHORT_EXPECT_THROW_WITH(ranks.groups[0].barrier({.timeout = milliseconds(1)}), EndOfOwner,
                               "the owner has ended");
      COHORT_EXPECT_THROW_WITH(ranks.groups[0].subgroup({0}), EndOfOwner, "the owner has ended");
    }
  }
}

// Rank 1 may still take what rank 0 has sent.
TEST(GroupOwnerTest, AGroupWithoutCallsIsNotAborted) {
  OwnedGroups ranks("shm");
  std::thread other([&] { sum_ones(ranks.groups[1]); });
  sum_ones(ranks.groups[0]);
  other.join();
  ranks.owners[0]->has_ended = true;
  end_calls(ranks.groups[0]);
  COHORT_EXPECT_THROW_WITH(sum_ones(ranks.groups[0]), EndOfOwner, "the owner has ended");
  COHORT_EXPECT_THROW_WITH(sum_ones(ranks.groups[1], milliseconds(20)), TimeoutError, "rank 0");
}

// Gloo itself waits for the other rank's connection until the timeout.
TEST(GroupOwnerTest, TheMakingOfASubgroupOverGlooEndsWithTheOwner) {
  OwnedGroups ranks("gloo");
  const std::int64_t num_keys = ranks.store->getNumKeys();
  const base::Deadline waited(std::chrono::seconds(10));
  std::thread making(
      [&] { COHORT_EXPECT_THROW_WITH(ranks.groups[0].subgroup({0, 1}), EndOfOwner, "the owner has ended"); });
  test::wait_until([&] { return ranks.store->getNumKeys() > num_keys; });
  ranks.owners[0]->has_ended = true;
  making.join();
  EXPECT_FALSE(waited.expired());
  EXPECT_THROW(ranks.groups[1].subgroup({0, 1}), Error);  // rank 0's thread of Gloo's ends, too
}

// Also where there is a GPU.
TEST(GroupOwnerTest, GroupsAreForTensorsOnTheCpu) {
  OwnedGroups automatic("auto");
  EXPECT_EQ(automatic.groups[0].backend(), "shm");
  at::Tensor elsewhere = at::ones({1}, at::kMeta);
  COHORT_EXPECT_THROW_WITH(automatic.groups[0].all_reduce(elsewhere), UsageError,
                           "no call on a GPU could be");
  COHORT_EXPECT_THROW_WITH(automatic.groups[0].subgroup({0}, {.backend = "nccl"}), UsageError,
                           "calls of backend nccl cannot be ended");
  for (const std::string backend : {"nccl", "mpi"}) {
    OwnedGroups ranks;
    const std::string words = base::concat("calls of backend ", backend, " cannot be ended");
    std::thread other([&] { COHORT_EXPECT_THROW_WITH(ranks.make(1, backend), UsageError, words); });
    COHORT_EXPECT_THROW_WITH(ranks.make(0, backend), UsageError, words);
    other.join();
  }
}

// A time that a caller gives to one call is that call's own.
TEST(GroupOwnerTest, ItGivesUpRanksThatACallHasWaitedForUntilTheTimeoutOfTheGroup) {
  struct Wait {
    std::string backend, where;
    std::function<void(const Group& group)> wait;
  };
  const std::vector<Wait> waits{
      {"gloo", "all_reduce 0 of group 'owned'", [](const Group& group) { sum_ones(group); }},
      {"shm", "all_reduce 0 of group 'owned'", [](const Group& group) { sum_ones(group); }},
      {"shm", "all_gather 0 of group 'owned'", [](const Group& group) { all_gather_text(group, "text"); }},
      {"shm", "barrier/0 of group 'owned'", [](const Group& group) { group.barrier(); }},
      {"shm", "the making of group 'owned.0'", [](const Group& group) { group.subgroup({0, 1}); }},
  };
  for (const Wait& wait : waits) {
    SCOPED_TRACE(wait.backend + " " + wait.where);
    OwnedGroups ranks(wait.backend);
    ranks.groups[0].shared_state()->timeout = milliseconds(20);
    COHORT_EXPECT_THROW_WITH(wait.wait(ranks.groups[0]), EndOfOwner, "the owner has ended");
    EXPECT_EQ(ranks.owners[0]->given_up, std::vector<int>{1});
    EXPECT_EQ(ranks.owners[0]->waited_in.substr(0, wait.where.size()), wait.where);
  }
  OwnedGroups ranks("shm");
  COHORT_EXPECT_THROW_WITH(ranks.groups[0].barrier({.timeout = milliseconds(1)}), TimeoutError, "rank 1");
  COHORT_EXPECT_THROW_WITH(sum_ones(ranks.groups[0], milliseconds(20)), TimeoutError, "rank 1");
  EXPECT_TRUE(ranks.owners[0]->given_up.empty());
}

// The first one that is late ends both. Somebody waits for the other one, whose time is not over.
TEST(GroupOwnerTest, OfTwoCallsTheSoonerDeadlineCounts) {
  OwnedGroups ranks("shm");
  GroupState& state = *ranks.groups[0].shared_state();
  at::Tensor first = at::ones({100}), second = at::ones({100});
  state.timeout = milliseconds(20);
  Pending sooner = ranks.groups[0].all_reduce(first);
  state.timeout = milliseconds(20'000);
  Pending later = ranks.groups[0].all_reduce(second);
  COHORT_EXPECT_THROW_WITH(later.wait(), EndOfOwner, "the owner has ended");
  EXPECT_EQ(ranks.owners[0]->given_up, std::vector<int>{1});
  COHORT_EXPECT_THROW_WITH(sooner.wait(), EndOfOwner, "the owner has ended");
}

struct DetectorOfTest : HangDetector {
  void failed(const std::string&) override { has_begun = true; }
  void wait_for_table(base::Deadline) override {}
  bool has_begun = false;
};

// However many calls were under way. Other ranks wait for the table of the hang detector meanwhile.
TEST(GroupOwnerTest, AGroupThatHasLostAPeerWaitsForTheNewsOnce) {
  for (const char* const backend : {"shm", "gloo"}) {
    SCOPED_TRACE(backend);
    OwnedGroups ranks(backend);
    const auto detector = std::make_shared<DetectorOfTest>();
    ASSERT_TRUE(ranks.groups[0].shared_state()->registry->set_hang_detector(detector));
    bool had_begun = false;
    ranks.owners[0]->on_wait = [&] { had_begun = detector->has_begun; };
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 5; ++i) tensors.push_back(at::ones({100}));
    std::vector<Pending> calls;
    for (at::Tensor& tensor : tensors) calls.push_back(ranks.groups[0].all_reduce(tensor));
    GroupState& peer = *ranks.groups[1].shared_state();
    peer.mark_broken("it is gone", base::Deadline(std::chrono::seconds(20)));
    peer.end_calls(ErrorCause::kPeer);
    for (Pending& call : calls) EXPECT_THROW(call.wait(), Error);
    EXPECT_EQ(ranks.owners[0]->num_waits, 1);
    EXPECT_TRUE(had_begun);
  }
}

// A group may be used by several threads in turn, and the first one waits.
TEST(GroupOwnerTest, ACallThatBeginsWhileAnotherOneWaitsForTheNewsWaitsToo) {
  OwnedGroups ranks("shm");
  OwnerOfTest& owner = *ranks.owners[0];
  std::promise<void> news;
  owner.on_wait = [&, has_come = news.get_future().share()] { has_come.wait(); };
  const auto call = [&] {
    COHORT_EXPECT_THROW_WITH(sum_ones(ranks.groups[0]), EndOfOwner, "the owner has ended");
  };
  GroupState& peer = *ranks.groups[1].shared_state();
  peer.mark_broken("it is gone", base::Deadline(std::chrono::seconds(20)));
  peer.end_calls(ErrorCause::kPeer);
  std::thread first(call);
  test::wait_until([&] { return owner.num_waits == 1; });
  std::thread second(call);
  test::wait_until([&] { return ranks.groups[0].shared_state()->calls_under_way == 2; });
  owner.has_ended = true;
  news.set_value();
  first.join();
  second.join();
  EXPECT_EQ(owner.num_waits, 1);
}

// The others learn of it, and wait.
TEST(GroupOwnerTest, ARankThatFailsByItselfDoesNotWaitForTheNews) {
  static std::once_flag is_registered;  // where the test is repeated
  std::call_once(is_registered, [&] {
    register_backend("fails on rank 0", {.make =
                                             [](const BackendOptions& options) {
                                               if (options.rank == 0)
                                                 throw SystemError("test", "no space left");
                                               BackendInstance made = make_backend("fake", options);
                                               made.is_distributed = true;
                                               return made;
                                             },
                                         .ends_calls = true});
  });
  OwnedGroups ranks;
  std::thread other([&] {
    COHORT_EXPECT_THROW_WITH(ranks.make(1, "fails on rank 0"), PeerError, "rank 0: [test] no space");
  });
  COHORT_EXPECT_THROW_WITH(ranks.make(0, "fails on rank 0"), SystemError, "no space left");
  other.join();
  EXPECT_EQ(ranks.owners[0]->num_waits, 0);
  EXPECT_EQ(ranks.owners[1]->num_waits, 1);
}

// As those of generations, of which there may be hundreds.
TEST(GroupOwnerTest, GroupsOfOneTitleShareTheRowsOfTheTimeline) {
  const Group group = join_process_group({.store = c10::make_intrusive<c10d::HashStore>(),
                                          .name = "generation 7 group 0",
                                          .title = "group 0",
                                          .backend = "fake"});
  EXPECT_EQ(group.shared_state()->row_name(0), "group 0");
  EXPECT_EQ(group.subgroup({0}).shared_state()->row_name(1), "group 0.0 (2)");
  EXPECT_EQ(group.subgroup({0}).name(), "generation 7 group 0.1");
}

TEST(GroupOwnerTest, ARendezvousOverAStoreNamesWhoDidNotCome) {
  COHORT_EXPECT_THROW_WITH(join_process_group({.store = c10::make_intrusive<c10d::HashStore>(),
                                               .where = "a store of the test",
                                               .size = 2,
                                               .timeout = milliseconds(20)}),
                           RendezvousError, "rank 1 of 2 did not come to a store of the test");
  COHORT_EXPECT_THROW_WITH(join_process_group({.rank = 2, .size = 2}), UsageError, "rank is 2");
}

TEST(GroupOwnerTest, ARendezvousGivesUpWhoDidNotCome) {
  OwnedGroups ranks;
  ranks.timeout = milliseconds(20);
  COHORT_EXPECT_THROW_WITH(ranks.make(0, "shm"), EndOfOwner, "the owner has ended");
  EXPECT_EQ(ranks.owners[0]->given_up, std::vector<int>{1});
  EXPECT_EQ(ranks.owners[0]->waited_in, "the making of group 'owned'");
  // Others have given up the one that comes now.
  COHORT_EXPECT_THROW_WITH(ranks.make(1, "shm"), RendezvousError, "rank 1 of 2 did not come");
  EXPECT_TRUE(ranks.owners[1]->given_up.empty());
  EXPECT_EQ(ranks.owners[1]->num_waits, 1);
}

}  // namespace
}  // namespace cohort::comm

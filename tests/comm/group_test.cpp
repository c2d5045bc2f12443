#include "cohort/comm/group.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/comm/backends/fake/fake.h"
#include "cohort/comm/internal/backend.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using test::run_ranks;

void wait_until(const std::function<bool()>& done) {
  const base::Deadline deadline(std::chrono::seconds(20));
  while (!done()) {
    deadline.check("test", "the other ranks");
    std::this_thread::sleep_for(milliseconds(5));
  }
}

TEST(GroupTest, KnowsItsPlace) {
  run_ranks(3, "gloo", [](Group& group) {
    EXPECT_EQ(group.size(), 3);
    EXPECT_EQ(group.backend(), "gloo");
    EXPECT_EQ(group.job_ranks(), (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(group.process_group()->getRank(), group.rank());
    // c10d's own interface works beside ours.
    std::vector<at::Tensor> tensors{at::ones({2})};
    group.process_group()->allreduce(tensors)->wait();
    EXPECT_EQ(tensors[0][1].item<float>(), 3);
  });
}

TEST(GroupTest, SubgroupsSpeakAmongThemselvesAndSeveralLiveAtOnce) {
  run_ranks(4, "gloo", [](Group& world) {
    const Group even = world.subgroup({0, 2}), odd = world.subgroup({1, 3}), rest = world.subgroup({1, 2, 3});
    EXPECT_EQ(static_cast<bool>(even), world.rank() % 2 == 0);
    EXPECT_EQ(static_cast<bool>(odd), world.rank() % 2 == 1);
    const Group& own_group = even ? even : odd;
    EXPECT_EQ(own_group.rank(), world.rank() / 2);
    EXPECT_EQ(own_group.job_ranks()[1] % 2, world.rank() % 2);
    at::Tensor sum = at::full({1}, world.rank(), at::kInt), all = sum.clone(), some = sum.clone();
    Pending first = own_group.all_reduce(sum), second = world.all_reduce(all);
    if (rest) {
      rest.all_reduce(some).wait();
      EXPECT_EQ(some.item<int>(), 6);
      const Group nested = rest.subgroup({1, 2});
      EXPECT_EQ(static_cast<bool>(nested), world.rank() != 1);
      if (nested) {
        EXPECT_EQ(nested.job_ranks(), (std::vector<int>{2, 3}));
      }
    }
    second.wait();
    first.wait();
    EXPECT_EQ(sum.item<int>(), world.rank() % 2 == 0 ? 2 : 4);
    EXPECT_EQ(all.item<int>(), 6);
    COHORT_EXPECT_THROW_WITH((even ? odd : even).rank(), UsageError, "this process is not in the group");
    world.barrier();
  });
}

TEST(GroupTest, ASubgroupLeavesItsParentsStoreAsItWas) {
  for (const char* backend : {"gloo", "shm"}) {
    run_ranks(2, backend, [](Group& group) {
      const milliseconds before = group.store()->getTimeout();
      group.barrier();
      const Group made = group.subgroup({0, 1}, {.timeout = milliseconds(5000)});
      EXPECT_EQ(group.store()->getTimeout(), before);
      if (group.rank() == 0) {
        EXPECT_THROW(group.subgroup({0, 1}, {.timeout = milliseconds(100)}), Error);
        EXPECT_EQ(group.store()->getTimeout(), before) << "not made";
      }
      group.barrier();
    });
  }
}

TEST(GroupTest, AGroupMayBeLetGoAtOnce) {
  for (int round = 0; round < 100; ++round) {
    run_ranks(3, "gloo", [](Group&) {});
  }
}

TEST(GroupTest, WhoWaitsForAGroupIsToldThatARankCouldNotMakeIt) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::thread other([&] {  // comes as far as the connections, and no further
    const auto made = make_gloo({.store = c10::make_intrusive<c10d::PrefixStore>("cohort/world/gloo", store),
                                 .connections = std::make_shared<StoreConnections>(store),
                                 .prefix = "cohort/world/gloo",
                                 .rank = 1,
                                 .size = 2,
                                 .timeout = std::chrono::seconds(20),
                                 .deadline = base::Deadline(std::chrono::seconds(20)),
                                 .reach = "127.0.0.1"});
    store->set("cohort/world/not made", "rank 1: it had enough");
    store->set("cohort/world/made/open", "1");
    wait_until([&] { return store->check({"seen"}); });
  });
  COHORT_EXPECT_THROW_WITH(make_group(store, 0, 2, "gloo", std::chrono::seconds(20)), PeerError,
                           "cannot make group 'world' (rank 0/2, gloo): rank 1: it had enough");
  store->set("seen", "1");
  other.join();
}

// Lazily negative and conjugate tensors: what is written to them through LibTorch is lost in a copy.
TEST(GroupTest, TensorsWhoseValuesDoNotLieInMemory) {
  for (const char* backend : {"gloo", "shm"}) {
    SCOPED_TRACE(backend);
    run_ranks(2, backend, [](Group& group) {
      const std::vector<std::function<at::Tensor(const at::Tensor&)>> forms = {
          [](const at::Tensor& t) { return t.neg()._neg_view(); },
          [](const at::Tensor& t) { return at::imag(at::complex(t, t.neg()).conj()); },
          [](const at::Tensor& t) { return at::complex(t, t).conj(); }};
      const at::Tensor own_numbers = at::arange(1, 4).to(at::kFloat) + group.rank(),
                       sum = at::tensor({3.F, 5.F, 7.F});
      for (const auto& form : forms) {
        at::Tensor t = form(own_numbers);
        ASSERT_TRUE(t.is_neg() || t.is_conj());
        group.all_reduce(t).wait();
        EXPECT_TRUE(at::equal(t, form(sum))) << t;
        t = form(own_numbers);
        group.broadcast(t, 0).wait();
        EXPECT_TRUE(at::equal(t, form(at::arange(1, 4).to(at::kFloat)))) << t;
        at::Tensor all = at::zeros({2, 3}, t.options())._neg_view();
        group.all_gather(all, form(own_numbers)).wait();
        EXPECT_TRUE(at::equal(all[1], form(at::arange(2, 5).to(at::kFloat)))) << all;
      }
      const at::Tensor nothing = at::_efficientzerotensor({3});
      at::Tensor all = at::ones({6}), written = nothing;
      group.all_gather(all, nothing).wait();
      EXPECT_TRUE(at::equal(all, at::zeros({6})));
      COHORT_EXPECT_THROW_WITH(group.all_reduce(written), UsageError, "zeros without memory");
    });
  }
}

TEST(GroupTest, WhatCannotBeIsRejectedBeforeAnythingTravels) {
  run_ranks(2, "gloo", [](Group& group) {
    at::Tensor t = at::ones({4}), small = at::ones({1}), whole = at::ones({4}, at::kInt);
    COHORT_EXPECT_THROW_WITH(group.broadcast(t, 2), UsageError, "root is 2, expected 0 to 1");
    COHORT_EXPECT_THROW_WITH(group.all_gather(t, small), UsageError, "2 times as many numbers");
    COHORT_EXPECT_THROW_WITH(group.reduce_scatter(t, whole), UsageError, "reduce_scatter: got int");
    COHORT_EXPECT_THROW_WITH(group.all_to_all(t, at::ones({3})), UsageError,
                             "3 rows of input do not divide by 2");
    COHORT_EXPECT_THROW_WITH(group.all_to_all(t, t, {1, 2}, {2, 2}), UsageError, "2 numbers whose sum is 4");
    COHORT_EXPECT_THROW_WITH(group.send(t, group.rank()), UsageError, "cannot send to itself");
    COHORT_EXPECT_THROW_WITH(group.gather({}, t, group.rank()), UsageError, "gather: got 0 outputs");
    COHORT_EXPECT_THROW_WITH(group.subgroup({1, 0}), UsageError, "must ascend");
    COHORT_EXPECT_THROW_WITH(group.subgroup({0, 5}), UsageError, "last rank of the subgroup is 5");
    at::Tensor parameter = at::ones({2}).requires_grad_();
    COHORT_EXPECT_THROW_WITH(group.all_reduce(parameter), UsageError,
                             "requires grad would be changed in place");
    COHORT_EXPECT_THROW_WITH(group.all_reduce(t, ReduceOp::SUM, {milliseconds(-5)}), UsageError,
                             "timeout is -5 ms");
    at::Tensor elsewhere = at::ones({4}, at::kMeta);
    COHORT_EXPECT_THROW_WITH(group.all_reduce(elsewhere), UsageError,
                             "of backend gloo carries no tensors on meta");
    group.all_reduce(t).wait();  // and the group is as good as before
    EXPECT_EQ(t[0].item<float>(), 2);
  });
  const auto store = c10::make_intrusive<c10d::HashStore>();
  COHORT_EXPECT_THROW_WITH(make_group(store, 0, 1, "glo", milliseconds(100)), UsageError, "Try: gloo");
  COHORT_EXPECT_THROW_WITH(make_group(store, 3, 2, "gloo", milliseconds(100)), UsageError,
                           "rank is 3, expected 0 to 1");
  COHORT_EXPECT_THROW_WITH(make_group(store, 0, 1, "gloo", milliseconds(0)), UsageError, "timeout is 0 ms");
}

TEST(BackendTest, OneThatIsNotInThisBuildSaysWhyAndWhatToDo) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto names = backend_names();
  const auto built = [&](const char* name) { return std::ranges::find(names, name) != names.end(); };
  EXPECT_TRUE(built("gloo"));
  EXPECT_TRUE(built("fake"));
  EXPECT_EQ(built("nccl"), nccl_absent().empty());
  EXPECT_EQ(built("mpi"), mpi_absent().empty());
  if (!built("mpi")) {
    COHORT_EXPECT_THROW_WITH(make_group(store, 0, 1, "mpi", milliseconds(100)), UsageError,
                             "[comm.mpi] backend mpi is not in this build: " + mpi_absent() + ". Try: gloo");
  }
  if (!built("nccl")) {
    COHORT_EXPECT_THROW_WITH(
        make_group(store, 0, 1, "nccl", milliseconds(100)), UsageError,
        "[comm.nccl] backend nccl is not in this build: " + nccl_absent() + ". Try: gloo");
  }
}

TEST(BackendTest, AutoIsNcclWhereThereAreAGpuAndNcclShmOnOneHostAndSaysWhy) {
  std::map<std::string, BackendType> with_nccl = backend_types(), without = with_nccl;
  with_nccl.at("nccl").absent = [] { return ""; };
  without.at("nccl").absent = [] { return "no nccl.h"; };
  const BackendChoice none = choose_backend({.device_reason = "no GPU"}, &with_nccl),
                      here = choose_backend({.one_host = true, .device_reason = "no GPU"}, &with_nccl),
                      absent = choose_backend({true, true, "one GPU"}, &without),
                      both = choose_backend({true, true, "one GPU"}, &with_nccl);
  EXPECT_EQ(here.backend, "shm");
  EXPECT_EQ(here.reason, "all ranks are on this host, and tensors on the CPU: no GPU");
  EXPECT_EQ(none.backend, "gloo");
  EXPECT_EQ(none.reason, "tensors are on the CPU: no GPU");
  EXPECT_EQ(absent.backend, "gloo");
  EXPECT_EQ(absent.reason, "nccl would suit better, but no nccl.h");
  EXPECT_EQ(both.backend, "nccl");
  EXPECT_EQ(both.reason, "one GPU");
}

COHORT_REGISTER_BACKEND("two_gloos", {.make = make_gloo, .fit = [](const BackendSituation& situation) {
                                        return BackendFit{situation.device_reason == "the test" ? 99 : 0,
                                                          "asked for"};
                                      }});

TEST(BackendTest, ARegisteredBackendIsMadeByNameAndChosenWhereItSuits) {
  run_ranks(2, "two_gloos", [](Group& group) {
    at::Tensor tensor = at::ones({3});
    group.all_reduce(tensor).wait();
    EXPECT_TRUE(at::equal(tensor, at::full({3}, 2.0f)));
    EXPECT_EQ(group.backend(), "two_gloos");
  });
  EXPECT_EQ(choose_backend({.device_reason = "the test"}).backend, "two_gloos");
  EXPECT_EQ(choose_backend({.device_reason = "no GPU"}).backend, "gloo");
  COHORT_EXPECT_THROW_WITH(register_backend("gloo", {.make = make_gloo}), UsageError,
                           "the backend 'gloo' is registered already, by Cohort");
  COHORT_EXPECT_THROW_WITH(register_backend("auto", {.make = make_gloo}), UsageError,
                           "the backend 'auto' is registered already, by Cohort");
}

COHORT_REGISTER_BACKEND("tagless", {.make = [](const BackendOptions& options) {
                          BackendInstance made = make_fake(options);
                          made.no_message_tags = "Tagless has no tags";
                          return made;
                        }});

TEST(BackendTest, AMessageWithATagIsRejectedByABackendThatHasNone) {
  const Group group = make_group(c10::make_intrusive<c10d::HashStore>(), 0, 2, "tagless", milliseconds(1000));
  at::Tensor tensor = at::ones({3});
  COHORT_EXPECT_THROW_WITH(group.send(tensor, 1, 7), UsageError,
                           "send: tag is 7, and Tagless has no tags: it would take messages in the order in "
                           "which they were sent");
  COHORT_EXPECT_THROW_WITH(group.recv(tensor, 1, 7), UsageError, "recv: tag is 7, and Tagless has no tags");
  group.send(tensor, 1).wait();  // in the order in which they are sent
}

TEST(GroupTest, ACollectiveThatARankDoesNotJoinEndsAtTheDeadlineAndBreaksTheGroup) {
  std::atomic<int> passed{0};
  run_ranks(2, "gloo", [&](Group& group) {
    group.barrier();
    if (group.rank() == 1) {  // stuck elsewhere, until the other has given up
      wait_until([&] { return passed.load() != 0; });
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    at::Tensor t = at::ones({3, 5});
    COHORT_EXPECT_THROW_WITH(group.all_reduce(t, ReduceOp::SUM, {milliseconds(300)}).wait(), TimeoutError,
                             "all_reduce 0 of group 'world' (rank 0/2, float[3, 5], ");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(3000));
    COHORT_EXPECT_THROW_WITH(group.all_reduce(t), CommError,
                             "failed before and cannot be used: all_reduce 0");
    passed = 1;
  });
  EXPECT_EQ(passed.load(), 1);
}

TEST(GroupTest, AStuckRankIsNamed) {
  std::atomic<bool> over{false};
  std::string message;
  run_ranks(3, "gloo", [&](Group& group) {
    group.barrier();
    if (group.rank() == 2) {
      wait_until([&] { return over.load(); });
      return;
    }
    at::Tensor t = at::ones({1});
    try {
      group.all_reduce(t, ReduceOp::SUM, {milliseconds(300)}).wait();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const CommError& error) {
      if (group.rank() == 0) message = error.what();
    } catch (const Error& error) {
      if (group.rank() == 0) message = error.what();
    }
    group.store()->add("gave up", 1);
    if (group.rank() == 0) {
      wait_until([&] { return group.store()->add("gave up", 0) == 2; });
      over = true;
    }
  });
  EXPECT_NE(message.find("rank 2 of 3 did not notice: dead, or stuck"), std::string::npos) << message;
}

TEST(GroupTest, APeerThatIsGoneIsNoticedByItsConnectionAndNotAtTheDeadline) {
  run_ranks(2, "gloo", [](Group& group) {
    at::Tensor t = at::ones({1000});
    group.all_reduce(t).wait();
    if (group.rank() == 1) return;  // closes its end
    const auto begin = std::chrono::steady_clock::now();
    // The deadline is 20 s.
    COHORT_EXPECT_THROW_WITH(group.all_reduce(t).wait(), PeerError,
                             "all_reduce 1 of group 'world' (rank 0/2");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(5000));
  });
}

TEST(GroupTest, ABarrierNamesTheRanksThatHaveNotCome) {
  run_ranks(3, "gloo", [](Group& group) {
    group.barrier();
    if (group.rank() == 0) {
      COHORT_EXPECT_THROW_WITH(group.barrier({milliseconds(100)}), TimeoutError,
                               "barrier/1 of group 'world' (rank 0/3");
      COHORT_EXPECT_THROW_WITH(group.barrier({milliseconds(50)}), TimeoutError,
                               "ranks 1 and 2 have not come");
    }
  });
}

TEST(GroupTest, APendingThatNobodyWaitsForKeepsItsMemoryUntilItIsDone) {
  run_ranks(2, "gloo", [](Group& group) {
    at::Tensor kept = at::ones({4});
    for (int i = 0; i < 50; ++i) {
      at::Tensor t = at::full({100000}, 1.0F);
      group.all_reduce(t);
    }
    group.all_reduce(kept).wait();
    EXPECT_EQ(kept[0].item<float>(), 2);
  });
}

TEST(FakeTest, RecordsWhatWasCalledInAGroupOfAnySize) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Group group = make_group(store, 3, 64, "fake", milliseconds(1000));
  at::Tensor t = at::full({2, 3}, 2.0F);
  group.all_reduce(t).wait();
  EXPECT_EQ(t[0][0].item<float>(), 128);
  group.broadcast(t, 5).wait();
  group.barrier();
  const auto calls = FakeBackend::of(group).calls();
  ASSERT_EQ(calls.size(), 3U);
  EXPECT_EQ(calls[0].name, "all_reduce");
  EXPECT_EQ(calls[0].shapes, (std::vector<std::vector<std::int64_t>>{{2, 3}}));
  EXPECT_EQ(calls[1].name, "broadcast");
  EXPECT_EQ(calls[1].peer, 5);
  EXPECT_EQ(calls[2].name, "barrier");
  Group other = make_group(c10::make_intrusive<c10d::HashStore>(), 0, 1, "gloo", milliseconds(1000));
  COHORT_EXPECT_THROW_WITH(FakeBackend::of(other), UsageError, "the group's backend is gloo");
}

}  // namespace
}  // namespace cohort::comm

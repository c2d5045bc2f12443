// What becomes of calls whose deadline has passed: who may write to their tensors, and who ends them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/error.h"
#include "cohort/comm/backend.h"
#include "cohort/comm/backends/fake/fake.h"
#include "cohort/comm/init.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/internal/pending_state.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/processes.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::run_ranks;
using test::wait_until;

bool are_all(const at::Tensor& tensor, int value) {
  return tensor.eq(value).all().item<bool>();
}

// As another thread may have further calls wait all the time: each task here is given before the one before
// it ends.
TEST(LateCallTest, WhoWaitsForEarlierCallsDoesNotWaitForLaterOnes) {
  GroupState group;
  std::atomic<bool> is_over{false};
  std::atomic<int> num_run{0};
  std::function<void()> call_again = [&] {
    ++num_run;
    if (!is_over) group.enqueue(call_again);
  };
  group.enqueue(call_again);
  group.wait_until_begun(base::Deadline(seconds(10)), "the test");
  EXPECT_GE(num_run, 1);
  is_over = true;
  EXPECT_TRUE(test::comes_true([&] { return group.is_queue_empty(); }));
}

// The second call comes after one that rank 1 makes late, so that the backend has it for a part of its time.
TEST(LateCallTest, ACallThatEndedAfterAnotherWritesNothingLater) {
  for (const char* backend : {"shm", "gloo"}) {
    SCOPED_TRACE(backend);
    std::atomic<bool> has_called{false}, has_failed{false};
    run_ranks(2, backend, [&](Group& group) {
      group.shared_state()->steps = 9;
      at::Tensor first = at::ones({200'000}), second = at::ones({200'000});
      if (group.rank() == 1) {
        StoreAdapter kv_store = store_adapter_of(*group.shared_state());
        base::StoreBarrier(kv_store, "failed", 1, 2).arrive();  // so that rank 0's error does not wait for it
        wait_until([&] { return has_called.load(); });
        std::this_thread::sleep_for(milliseconds(100));
      }
      Pending compared = group.all_reduce(first);
      group.step_done();  // what follows is not compared
      if (group.rank() == 1) {
        compared.wait();
        wait_until([&] { return has_failed.load(); });
        try {
          group.all_reduce(second).wait();
        } catch (const Error&) {  // it is told that rank 0 has failed, or not
        }
      } else {
        const milliseconds time(1000);
        const base::Deadline waited(time);
        Pending later = group.all_reduce(second, ReduceOp::SUM, {time});
        has_called = true;
        EXPECT_THROW(later.wait(), TimeoutError);
        EXPECT_LT(waited.elapsed(), time + test::deadline_slack());
        second.fill_(7);
        has_failed = true;
        std::this_thread::sleep_for(milliseconds(1000));
        EXPECT_TRUE(are_all(second, 7));
        EXPECT_NO_THROW(compared.wait());
        EXPECT_TRUE(are_all(first, 2));
      }
      group.barrier();
    });
  }
}

// Rank 0's time is over while numbers travel, rank 1's is not: rank 1 stops itself after 5 ms of a core, so
// that a machine that is fast or busy with other work is in the middle too.
TEST(LateCallChild, DISABLED_Rank) {
  Group group = init_process_group({.backend = std::getenv("TEST_BACKEND"),
                                    .timeout = seconds(60),
                                    .check_consistency = ConsistencyCheck::kOff});
  at::Tensor tensor = at::ones({40'000'000});
  group.barrier();
  std::fprintf(stderr, "begins\n");
  if (group.rank() == 1) {
    ::raise(SIGSTOP);  // until the test sees that both are here
    ::signal(SIGPROF, [](int) { ::raise(SIGSTOP); });
    const itimerval core_time{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_usec = 5000}};
    ASSERT_EQ(::setitimer(ITIMER_PROF, &core_time, nullptr), 0);
  }
  const milliseconds timeout = group.rank() == 0 ? milliseconds(1'000) : milliseconds(30'000);
  bool has_failed = false;
  const base::Deadline waited(seconds(60));
  try {
    group.all_reduce(tensor, ReduceOp::SUM, {timeout}).wait();
  } catch (const Error& error) {
    has_failed = true;
    EXPECT_LT(waited.elapsed(), seconds(group.rank() == 0 ? 3 : 5)) << error.what();
    std::fprintf(stderr, "fails: %s\n", error.what());
  }
  EXPECT_TRUE(has_failed || are_all(tensor, 2));
  if (group.rank() == 0) {
    EXPECT_TRUE(has_failed) << "it was not in the middle";
    tensor.fill_(7);
    std::this_thread::sleep_for(seconds(3));
    EXPECT_TRUE(are_all(tensor, 7)) << tensor.ne(7).sum().item<std::int64_t>() << " were written after it";
  }
  std::_Exit(testing::Test::HasFailure() ? 1 : 0);
}

TEST(LateCallTest, ACollectiveThatTimedOutWhileNumbersTravelWritesNothingLater) {
  for (const char* backend : {"gloo", "shm"}) {
    SCOPED_TRACE(backend);
    test::RankProcesses ranks("LateCallChild", 2, {{"TEST_BACKEND", backend}});
    ranks.wait_for(0, "begins");
    ranks.wait_for(1, "begins");
    wait_until([&] { return ranks.is_stopped(1); });
    ranks.send(1, SIGCONT);
    ranks.wait_for(0, "fails");
    EXPECT_TRUE(ranks.is_stopped(1)) << "it was not in the middle";
    ranks.send(1, SIGCONT);
    EXPECT_EQ(ranks.wait(seconds(20)), std::vector<int>(2, 0)) << ranks.output(0) << ranks.output(1);
  }
}

// How long the error of `call` took on each rank of Gloo but rank 3, which does not come.
std::vector<milliseconds> times_of_errors(const std::function<void(Group& group)>& call) {
  std::vector<milliseconds> times(3);
  std::atomic<int> num_over{0};
  run_ranks(4, "gloo", [&](Group& group) {
    group.barrier();
    if (group.rank() == 3) return wait_until([&] { return num_over == 3; });
    std::this_thread::sleep_for(milliseconds(60 * group.rank()));
    const base::Deadline waited(seconds(60));
    try {
      call(group);
      ADD_FAILURE() << "there are numbers";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("3 of 4"), std::string::npos) << error.what();
    }
    times[static_cast<std::size_t>(group.rank())] =
        std::chrono::duration_cast<milliseconds>(waited.elapsed());
    ++num_over;
    wait_until([&] { return num_over == 3; });  // the end of a group closes its connections too
  });
  return times;
}

// Each rank waits for the one before it, and has more time.
TEST(LateCallTest, RanksThatWaitOneForAnotherEndWithTheFirst) {
  const auto times = times_of_errors([](Group& group) {
    const milliseconds timeout(group.rank() == 0 ? 300 : 15'000);
    at::Tensor tensor = at::ones({1000});
    group.recv(tensor, (group.rank() + 3) % 4, 0, {timeout}).wait();
  });
  for (const milliseconds time : times) EXPECT_LT(time, seconds(5)) << time.count() << " ms";
}

// A rank that another one's closing ends shortly before its own deadline is not late by it.
TEST(LateCallTest, RanksThatBeganOneAfterTheOtherEndAtTheirOwnDeadlines) {
  const auto times = times_of_errors([](Group& group) {
    at::Tensor tensor = at::ones({1000});
    group.all_reduce(tensor, ReduceOp::SUM, {milliseconds(1000)}).wait();
  });
  for (const milliseconds time : times) {
    EXPECT_LT(time, milliseconds(1000) + test::deadline_slack()) << time.count() << " ms";
  }
}

TEST(LateCallTest, AMessageThatComesAfterTheDeadlineIsNotReceived) {
  for (const char* backend : {"shm", "gloo"}) {
    SCOPED_TRACE(backend);
    run_ranks(2, backend, [&](Group& group) {
      at::Tensor tensor = at::full({1000}, 3);
      if (group.rank() == 0) {
        COHORT_EXPECT_THROW_WITH(group.recv(tensor, 1, 0, {milliseconds(200)}).wait(), TimeoutError,
                                 "recv 0");
        tensor.fill_(7);
        group.barrier();
        group.barrier();
        EXPECT_TRUE(are_all(tensor, 7));
      } else {
        group.barrier();
        try {
          group.send(tensor, 0, 0, {milliseconds(1000)}).wait();
        } catch (const Error&) {  // it is told that rank 0 has failed, or not
        }
        std::this_thread::sleep_for(milliseconds(300));
        group.barrier();
      }
    });
  }
}

// A group whose thread is busy until `go`.
Group make_busy(std::shared_ptr<const std::atomic<bool>> go) {
  Group group = make_group(c10::make_intrusive<c10d::HashStore>(), 0, 2, "fake", seconds(20));
  group.shared_state()->enqueue([go = std::move(go)] { wait_until([&] { return go->load(); }); });
  return group;
}

TEST(LateCallTest, ACallThatWasGivenUpInTheQueueIsNotHandedOver) {
  const auto go = std::make_shared<std::atomic<bool>>(false);
  const Group group = make_busy(go);
  at::Tensor tensor = at::ones({3});
  Pending pending = group.all_reduce(tensor, ReduceOp::SUM, {milliseconds(100)});
  COHORT_EXPECT_THROW_WITH(pending.wait(), TimeoutError,
                           "timed out while it waited for earlier calls that not all ranks have made");
  *go = true;
  wait_until([&] { return group.shared_state()->is_queue_empty(); });
  EXPECT_TRUE(FakeBackend::of(group).calls().empty());
}

// The group's thread takes the call from the queue just as it is given up.
TEST(LateCallTest, ACallThatWasGivenUpFailsAlsoOnceItHasLeftTheQueue) {
  const auto go = std::make_shared<std::atomic<bool>>(false);
  const Group group = make_busy(go);
  std::vector<at::Tensor> list{at::ones({3})};
  const auto call = std::make_shared<Pending::State>(group.shared_state(), "all_reduce", seconds(20));
  call->begin({.tensors = list}, [](milliseconds) { return Pending::State::WorkPtr(); });
  ASSERT_TRUE(call->cancel());
  *go = true;
  ASSERT_TRUE(call->beginning.wait(base::Deadline(seconds(20))));
  COHORT_EXPECT_THROW_WITH(call->finish(), TimeoutError,
                           "timed out while it waited for earlier calls that not all ranks have made");
}

TEST(LateCallTest, AGroupDoesNotWaitForItsThreadAfterACallInItsQueueWasGivenUp) {
  const auto go = std::make_shared<std::atomic<bool>>(false);
  Group group = make_busy(go);
  at::Tensor tensor = at::ones({3});
  Pending pending = group.all_reduce(tensor, ReduceOp::SUM, {milliseconds(100)});
  EXPECT_THROW(pending.wait(), TimeoutError);
  const base::Deadline waited(seconds(60));
  group = Group();
  EXPECT_LT(waited.elapsed(), seconds(4));
  *go = true;
}

// At the same moment one gives up and the group's thread comes to the call.
TEST(LateCallTest, ACallIsEitherGivenUpOrHandedOver) {
  int num_given_up = 0;
  constexpr int kRounds = 200;
  for (int round = 0; round < kRounds; ++round) {
    const auto go = std::make_shared<std::atomic<bool>>(false);
    std::atomic<bool> is_handed_over{false};
    const Group group = make_busy(go);
    const auto state = group.shared_state();
    std::vector<at::Tensor> list{at::ones({3})};
    const auto call = std::make_shared<Pending::State>(state, "all_reduce", seconds(20));
    call->begin({.tensors = list}, [&](milliseconds left) {
      EXPECT_GT(left, seconds(10));
      is_handed_over = true;
      return Pending::State::WorkPtr();
    });
    std::thread other([&] { *go = true; });
    if (round % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(20 * round));
    const bool was_given_up = call->cancel();
    other.join();
    wait_until([&] { return state->is_queue_empty(); });
    ASSERT_NE(was_given_up, is_handed_over.load()) << round;
    num_given_up += was_given_up ? 1 : 0;
    if (!was_given_up) continue;
    // On the other ranks it has its place before the calls that come after it.
    COHORT_EXPECT_THROW_WITH(state->check_usable(), CommError, "timed out while it waited for earlier calls");
  }
  EXPECT_GT(num_given_up, 0);
}

// Whoever waited has left, and what the thread runs holds the group.
TEST(LateCallTest, TheGroupsThreadMayLetGoOfTheGroupLast) {
  const auto go = std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> is_inside{false}, may_end{false};
  std::weak_ptr<Group::State> gone;
  {
    const Group group = make_busy(go);
    gone = group.shared_state();
    std::vector<at::Tensor> list{at::ones({3})};
    const auto call = std::make_shared<Pending::State>(group.shared_state(), "all_reduce", seconds(20));
    call->begin({.tensors = list}, [&](milliseconds) {
      is_inside = true;
      wait_until([&] { return may_end.load(); });
      return Pending::State::WorkPtr();
    });
    *go = true;
    wait_until([&] { return is_inside.load(); });
  }
  EXPECT_FALSE(gone.expired());
  may_end = true;
  wait_until([&] { return gone.expired(); });
  std::this_thread::sleep_for(milliseconds(20));  // the thread ends
}

// Rank 1 calls the backend itself while rank 0's call is compared: the backend's ranks differ from then on.
TEST(LateCallTest, WhatTheBackendRejectsWithinAComparisonBreaksTheGroup) {
  run_ranks(
      2, "shm",
      [](Group& group) {
        at::Tensor tensor = at::ones({100});
        if (group.rank() == 1) {
          std::vector<at::Tensor> list{tensor};
          EXPECT_ANY_THROW(group.shared_state()->group->allreduce(list)->wait());
          return group.barrier();
        }
        COHORT_EXPECT_THROW_WITH(group.all_reduce(tensor).wait(), Error, "ranks call different things");
        COHORT_EXPECT_THROW_WITH(group.shared_state()->check_usable(), CommError,
                                 "ranks call different things");
        group.barrier();
      },
      seconds(10), ConsistencyCheck::kAlways);
}

// As Gloo, which writes to sockets on the thread that sends.
class SignalBackend : public c10d::Backend {
 public:
  SignalBackend() : Backend(0, 2) {}
  const std::string getBackendName() const override { return "signals"; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int, int) override {
    sigset_t blocked;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    is_blocked = ::sigismember(&blocked, SIGPIPE) == 1;
    C10_THROW_ERROR(DistBackendError, "nothing is sent");
  }
  bool is_blocked = false;
};

// A group for GPUs has Gloo for tensors on the CPU.
COHORT_REGISTER_BACKEND("for_gpus", {.make = [](const BackendOptions&) {
                          return BackendInstance{.backend = c10::make_intrusive<SignalBackend>(),
                                                 .is_distributed = false,
                                                 .may_raise_sigpipe = false,
                                                 .device = c10::kCUDA};
                        }});

TEST(LateCallTest, MessagesRaiseNoSignalWhereTheBackendSaysThatTheyMay) {
  for (const bool may_raise : {true, false}) {
    const Group group = make_group(c10::make_intrusive<c10d::HashStore>(), 0, 2, "fake", seconds(20));
    const auto signals = c10::make_intrusive<SignalBackend>();
    group.process_group()->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::MPI, signals);
    group.process_group()->setDefaultBackend(c10d::ProcessGroup::BackendType::MPI);
    group.shared_state()->may_raise_sigpipe = may_raise;
    EXPECT_THROW(group.send(at::ones({2}), 1), CommError);
    EXPECT_EQ(signals->is_blocked, may_raise);
  }
  const auto says = [](const char* backend) {
    return make_group(c10::make_intrusive<c10d::HashStore>(), 0, 1, backend, seconds(20))
        .shared_state()
        ->may_raise_sigpipe;
  };
  EXPECT_TRUE(says("gloo"));
  EXPECT_FALSE(says("shm"));
  EXPECT_TRUE(says("for_gpus")) << "messages on the CPU are Gloo's there";
}

// Fits only while a test of it runs: `auto` would choose it elsewhere.
bool cpu_backend_fits = false;

COHORT_REGISTER_BACKEND("for_cpus", {.make =
                                         [](const BackendOptions&) {
                                           return BackendInstance{
                                               .backend = c10::make_intrusive<SignalBackend>(),
                                               .is_distributed = false,
                                               .may_raise_sigpipe = false};
                                         },
                                     .fit =
                                         [](const BackendSituation& situation) {
                                           const bool fits = cpu_backend_fits && !situation.cuda;
                                           return BackendFit{fits ? 15 : 0, "it is for CPUs"};
                                         }});

TEST(LateCallTest, AGroupForGpusHasBesideItTheCpuBackendThatFitsBest) {
  cpu_backend_fits = true;
  const Group group = make_group(c10::make_intrusive<c10d::HashStore>(), 0, 1, "for_gpus", seconds(20));
  cpu_backend_fits = false;
  EXPECT_EQ(group.process_group()->getBackend(c10::kCPU)->getBackendName(), "signals");
}

}  // namespace
}  // namespace cohort::comm

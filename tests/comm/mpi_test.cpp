// Backend mpi: mpirun starts this program again, each process as a rank.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/error.h"
#include "cohort/comm/internal/backend.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/processes.h"
#include "tests/support/processes/mpirun.h"
#include "tests/support/processes/process_state.h"
#include "tests/support/profiled_calls.h"
#include "tests/support/ranks.h"
#include "tests/support/slowdown.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using namespace std::chrono_literals;
using test::message_contains;

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

/// Tests of this program, run by `ranks` processes.
class Ranks {
 public:
  Ranks(int ranks, const std::string& filter, launch::Variables variables = {})
      : job_(folder_.path(), ranks,
             {std::filesystem::read_symlink("/proc/self/exe").string(), "--gtest_filter=" + filter,
              "--gtest_also_run_disabled_tests", "--gtest_color=no", "--gtest_brief=1"},
             with_rendezvous(std::move(variables))) {}

  int wait(milliseconds timeout = test::kSlowdown * 2min) { return job_.wait(timeout); }
  std::string output() const { return job_.output(); }
  /// Of the processes that have left their number, those that still run.
  int alive() const {
    int found = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with("pid ")) continue;
      if (!test::has_ended(std::stoi(name.substr(4)))) ++found;
    }
    return found;
  }

 private:
  static launch::Variables with_rendezvous(launch::Variables variables) {
    variables.emplace_back("MASTER_ADDR", "127.0.0.1");
    variables.emplace_back("MASTER_PORT", std::to_string(test::free_port()));
    return variables;
  }

  test::TempDir folder_;
  test::MpiJob job_;
};

void expect_passes(int ranks, const std::string& filter, int tests) {
  Ranks job(ranks, filter);
  EXPECT_EQ(job.wait(), 0) << job.output();
  const std::string passed = base::concat("[  PASSED  ] ", tests, tests == 1 ? " test." : " tests.");
  EXPECT_EQ(count(job.output(), passed), ranks) << job.output();
}

class MpiConformanceTest : public testing::TestWithParam<int> {};

// The same tests as those of gloo, and as many.
TEST_P(MpiConformanceTest, EveryRankPassesTheTestsOfAllBackends) {
  int tests = 0;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      if (std::string(suite.name()) == "Backends/ConformanceTest" &&
          std::string(suite.GetTestInfo(j)->name()).ends_with("/gloo_3_ranks")) {
        ++tests;
      }
    }
  }
  EXPECT_GT(tests, 5);
  expect_passes(GetParam(), "Processes/ConformanceTest.*/mpi_ranks", tests);
}

INSTANTIATE_TEST_SUITE_P(Ranks, MpiConformanceTest, testing::Values(1, 2, 3, 4));

void on_ranks(int size, const std::function<void(Group&)>& body, milliseconds timeout = test::kSlowdown * 30s,
              ConsistencyCheck check_consistency = ConsistencyCheck::kFirst) {
  test::run_ranks(size, "mpi", body, timeout, check_consistency);
}

TEST(MpiOrderChild, DISABLED_Run) {
  on_ranks(3, [](Group& group) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
      for (const std::int64_t numel : {std::int64_t{7}, std::int64_t{5'000'003}}) {
        std::vector<at::Tensor> all;
        for (int rank = 0; rank < 3; ++rank) {
          all.push_back(at::sin(at::arange(numel, at::kDouble) * (1.7 + rank)).to(dtype));
        }
        const at::Tensor& own_input = all[static_cast<std::size_t>(group.rank())];
        const at::Tensor sum = (all[0].to(wide) + all[1].to(wide) + all[2].to(wide)).to(dtype);
        const at::Tensor mean = ((all[0].to(wide) + all[1].to(wide) + all[2].to(wide)) / 3).to(dtype);

        at::Tensor reduced = own_input.clone(), averaged = own_input.clone(), at_root = own_input.clone();
        group.all_reduce(reduced).wait();
        EXPECT_TRUE(at::equal(reduced, sum)) << dtype << ", " << numel;
        group.all_reduce(averaged, ReduceOp::AVG).wait();
        EXPECT_TRUE(at::equal(averaged, mean)) << dtype << ", " << numel;
        group.reduce(at_root, 1).wait();
        EXPECT_TRUE(at::equal(at_root, group.rank() == 1 ? sum : own_input)) << dtype << ", " << numel;
        at::Tensor part = at::zeros({numel}, dtype);
        group.reduce_scatter(part, own_input.repeat({3})).wait();
        EXPECT_TRUE(at::equal(part, sum)) << dtype << ", " << numel;
      }
    }
  });
}

TEST(MpiTest, SumsAreMadeInTheOrderOfRanksWhateverTheSize) {
  expect_passes(3, "MpiOrderChild.*", 1);
}

TEST(MpiPiecesChild, DISABLED_Run) {
  on_ranks(3, [](Group& group) {
    const std::int64_t numel = 5'000'003;  // 20 MB: more than one piece
    const auto of = [&](int rank) { return at::arange(numel, at::kInt) + 1000 * rank; };
    const int rank = group.rank(), next = (rank + 1) % 3, before = (rank + 2) % 3;
    at::Tensor sent = of(rank), all = at::zeros({3, numel}, at::kInt), got = at::zeros({numel}, at::kInt);
    group.broadcast(sent, 2).wait();
    EXPECT_TRUE(at::equal(sent, of(2)));
    group.all_gather(all, of(rank)).wait();
    for (int from = 0; from < 3; ++from) EXPECT_TRUE(at::equal(all[from], of(from)));
    const at::Tensor rows = at::stack({of(rank), of(rank) + 1, of(rank) + 2});
    group.all_to_all(all, rows).wait();
    for (int from = 0; from < 3; ++from) EXPECT_TRUE(at::equal(all[from], of(from) + rank));
    Pending out = group.send(of(rank), next);
    group.recv(got, before).wait();
    out.wait();
    EXPECT_TRUE(at::equal(got, of(before)));
    at::Tensor own = all[rank];  // gathered in place
    own.copy_(of(rank));
    group.all_gather(all, own).wait();
    for (int from = 0; from < 3; ++from) EXPECT_TRUE(at::equal(all[from], of(from)));
  });
}

TEST(MpiTest, LongTensorsGoInPieces) {
  expect_passes(3, "MpiPiecesChild.*", 1);
}

TEST(MpiDirectChild, DISABLED_Run) {
  on_ranks(3, [](Group& group) {
    const auto& c10d_group = group.process_group();
    const int rank = group.rank();
    const auto of = [](int who) { return at::full({2, 3}, who + 1, at::kFloat); };
    const auto zeros = [] {
      return std::vector<at::Tensor>{at::zeros({2, 3}), at::zeros({2, 3}), at::zeros({2, 3})};
    };
    EXPECT_EQ(c10d_group->getBackendName(), "mpi");

    std::vector<at::Tensor> own_input{of(rank)};
    std::vector<std::vector<at::Tensor>> lists{zeros()};
    c10d_group->allgather(lists, own_input)->wait();
    for (int from = 0; from < 3; ++from)
      EXPECT_TRUE(at::equal(lists[0][static_cast<std::size_t>(from)], of(from)));

    std::vector<at::Tensor> two{of(rank), at::full({5}, rank, at::kInt)};
    std::vector<std::vector<at::Tensor>> of_ranks;
    for (int r = 0; r < 3; ++r) of_ranks.push_back({at::zeros({2, 3}), at::zeros({5}, at::kInt)});
    c10d_group->allgather_coalesced(of_ranks, two)->wait();
    for (int r = 0; r < 3; ++r) {
      EXPECT_TRUE(at::equal(of_ranks[static_cast<std::size_t>(r)][0], of(r)));
      EXPECT_TRUE(of_ranks[static_cast<std::size_t>(r)][1].eq(r).all().item<bool>());
    }

    std::vector<at::Tensor> to{of(10 * rank), of(10 * rank + 1), of(10 * rank + 2)}, from = zeros();
    c10d_group->alltoall(from, to)->wait();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(from[static_cast<std::size_t>(i)], of(10 * i + rank)));

    std::vector<at::Tensor> sum{at::zeros({2, 3})};
    std::vector<std::vector<at::Tensor>> parts{{of(rank), of(rank) * 2, of(rank) * 3}};
    c10d_group->reduce_scatter(sum, parts)->wait();
    EXPECT_TRUE(at::equal(sum[0], at::full({2, 3}, 6.0 * (rank + 1))));

    std::vector<at::Tensor> wholes{at::zeros({6, 3}), at::zeros({6, 3})}, ins{of(rank), of(rank) * 2};
    c10d_group->getBackend(c10::kCPU)->allgather_into_tensor_coalesced(wholes, ins)->wait();
    EXPECT_TRUE(at::equal(wholes[1], 2 * at::cat({of(0), of(1), of(2)})));

    ReduceOp twice;  // PREMUL_SUM, each rank with its own factor
    twice.op_ = ReduceOp::PREMUL_SUM;
    twice.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(rank + 1.0);
    at::Tensor scaled = at::ones({4}), scaled_part = at::zeros({2});
    group.all_reduce(scaled, twice).wait();
    EXPECT_TRUE(at::equal(scaled, at::full({4}, 6.0)));
    group.reduce_scatter(scaled_part, at::ones({6}), twice).wait();
    EXPECT_TRUE(at::equal(scaled_part, at::full({2}, 6.0)));

    const auto truth = [](bool a, bool b) { return at::tensor({int{a}, int{b}}).to(at::kBool); };
    at::Tensor any = truth(rank == 1, false), both = truth(rank == 1, true);
    group.all_reduce(any).wait();
    EXPECT_TRUE(at::equal(any, truth(true, false)));
    group.all_reduce(both, ReduceOp::MIN).wait();
    EXPECT_TRUE(at::equal(both, truth(false, true)));
    at::Tensor turn = at::complex(at::zeros({1}), at::ones({1}));
    group.all_reduce(turn, ReduceOp::PRODUCT).wait();
    EXPECT_TRUE(at::equal(turn, at::complex(at::zeros({1}), -at::ones({1}))));
    at::Tensor odd = rank == 1 ? at::full({3}, std::nan("")) : at::ones({3});
    group.all_reduce(odd, ReduceOp::MAX).wait();
    EXPECT_TRUE(odd.isnan().all().item<bool>());

    // Messages wait for nobody but their peer, and those from one rank come in order.
    if (rank == 0) {
      std::vector<at::Tensor> first{at::zeros({1})}, second{at::zeros({1})};
      const auto a = c10d_group->recvAnysource(first, 5);
      a->wait();
      const auto b = c10d_group->recvAnysource(second, 5);
      b->wait();
      EXPECT_EQ(a->sourceRank() + b->sourceRank(), 3);
      EXPECT_EQ(first[0].item<int>(), a->sourceRank());
      EXPECT_EQ(second[0].item<int>(), b->sourceRank());
    } else {
      group.send(at::full({1}, rank, at::kFloat), 0, 5).wait();
    }
    std::vector<at::Tensor> ones{at::ones({2})};
    const auto work = c10d_group->allreduce(ones);
    work->getFuture()->wait();
    EXPECT_TRUE(work->isCompleted());
    EXPECT_EQ(ones[0][0].item<float>(), 3);
    c10d_group->barrier()->wait();
  });
}

TEST(MpiTest, WhatC10dCallsIsThere) {
  expect_passes(3, "MpiDirectChild.*", 1);
}

TEST(MpiProfiledChild, DISABLED_Run) {
  test::ProfiledCalls calls("mpi:");
  int my_rank = -1;
  on_ranks(
      2,
      [&](Group& group) {
        my_rank = group.rank();
        test::make_calls_of_each_kind(group);
      },
      test::kSlowdown * 30s, ConsistencyCheck::kOff);
  std::map<std::string, test::ProfiledCalls::CallCount> profiled = calls.finish();
  const std::string message = my_rank == 0 ? "mpi:send" : "mpi:recv";
  for (const std::string& name :
       {std::string("mpi:all_reduce"), std::string("mpi:broadcast"), std::string("mpi:all_gather"),
        std::string("mpi:reduce_scatter"), message}) {
    EXPECT_EQ(profiled[name].ended, 1) << name;
    EXPECT_EQ(profiled[name].bytes, name == "mpi:all_gather" ? 800 : 400) << name;
    EXPECT_EQ(profiled[name].group, "world") << name;
  }
}

TEST(MpiTest, CollectivesAreSeenInLibTorchsProfilerWithTheirBytesAndGroup) {
  expect_passes(2, "MpiProfiledChild.*", 1);
}

TEST(MpiGroupsChild, DISABLED_Run) {
  on_ranks(4, [](Group& world) {
    const Group even = world.subgroup({0, 2}), odd = world.subgroup({1, 3}), rest = world.subgroup({1, 2, 3});
    const Group& own_group = even ? even : odd;
    at::Tensor sum = at::full({1}, world.rank(), at::kInt), all = sum.clone(), some = sum.clone();
    Pending first = own_group.all_reduce(sum), second = world.all_reduce(all);
    if (rest) {
      rest.all_reduce(some).wait();
      EXPECT_EQ(some.item<int>(), 6);
      const Group nested = rest.subgroup({1, 2});
      if (nested) nested.broadcast(some, 1).wait();
    }
    second.wait();
    first.wait();
    EXPECT_EQ(sum.item<int>(), world.rank() % 2 == 0 ? 2 : 4);
    EXPECT_EQ(all.item<int>(), 6);
    for (int i = 0; i < 100; ++i) {  // released at once
      const Group some_time = world.subgroup({0, 1, 2});
    }
    // One rank makes a group while a call is under way, the other when the call is over.
    const auto own_store = c10::make_intrusive<c10d::PrefixStore>("own", world.store());
    const Group unchecked =
        make_group(own_store, world.rank(), 4, "mpi", test::kSlowdown * 20s, "", ConsistencyCheck::kOff);
    at::Tensor numbers = at::ones({1 << 18});
    Pending running = unchecked.all_reduce(numbers);
    if (world.rank() != 0) running.wait();
    const Group two = unchecked.subgroup({0, 1});
    running.wait();
    EXPECT_EQ(numbers[0].item<float>(), 4);
    // Other numbers than mpirun's.
    const auto store = c10::make_intrusive<c10d::PrefixStore>("turned", world.store());
    const Group turned = make_group(store, 3 - world.rank(), 4, "mpi", test::kSlowdown * 30s);
    at::Tensor from = at::full({1}, world.rank(), at::kInt);
    turned.broadcast(from, 0).wait();
    EXPECT_EQ(from.item<int>(), 3);
    world.barrier();
  });
}

TEST(MpiTest, GroupsOfSomeRanksSpeakAmongThemselves) {
  expect_passes(4, "MpiGroupsChild.*", 1);
}

// A call that is compared first begins when the comparison is over: on some ranks before others have made the
// group that comes next, and on some after it. MPI makes it while no call moves.
TEST(MpiComparedCallsChild, DISABLED_Run) {
  on_ranks(
      3,
      [](Group& world) {
        for (int i = 0; i < 50; ++i) {
          at::Tensor sum = at::full({1}, world.rank(), at::kInt), pair = sum.clone();
          Pending running = world.all_reduce(sum);
          const Group two = world.subgroup({1, 2});
          running.wait();
          EXPECT_EQ(sum.item<int>(), 3);
          if (two) two.all_reduce(pair).wait();
          EXPECT_EQ(pair.item<int>(), two ? 3 : 0);
        }
        world.barrier();
      },
      test::kSlowdown * 30s, ConsistencyCheck::kAlways);
}

TEST(MpiTest, GroupsThatAreMadeWhileCallsAreComparedHoldNobodyUp) {
  expect_passes(3, "MpiComparedCallsChild.*", 1);
}

TEST(MpiRejectionsChild, DISABLED_Run) {
  on_ranks(2, [](Group& group) {
    at::Tensor real = at::ones({4}), turn = at::complex(at::ones({2}), at::ones({2})),
               truth = at::ones({2}, at::kBool), tiny = at::ones({4}).to(at::kFloat8_e4m3fn);
    COHORT_EXPECT_THROW_WITH(group.all_reduce(real, ReduceOp::BAND).wait(), UsageError,
                             "Backend mpi: all_reduce does not support BAND of Float");
    COHORT_EXPECT_THROW_WITH(group.all_reduce(turn, ReduceOp::MAX).wait(), UsageError,
                             "Backend mpi: all_reduce does not support MAX of ComplexFloat");
    COHORT_EXPECT_THROW_WITH(group.reduce(truth, 0, ReduceOp::AVG).wait(), UsageError,
                             "Backend mpi: reduce does not support AVG of Bool");
    COHORT_EXPECT_THROW_WITH(group.all_reduce(tiny).wait(), UsageError,
                             "Backend mpi: all_reduce does not support SUM of Float8_e4m3fn");
    COHORT_EXPECT_THROW_WITH(group.send(real, 1 - group.rank(), -1), UsageError,
                             "send: tag is -1, expected 0 to");
    std::vector<at::Tensor> views{at::ones({4, 4}).t()};
    COHORT_EXPECT_THROW_WITH(
        group.process_group()->allreduce(views), c10::Error,
        "Backend mpi: all_reduce: got a tensor of strides [1, 4], expected a contiguous one");
    COHORT_EXPECT_THROW_WITH(group.broadcast(real, group.rank()).wait(), UsageError,
                             "rank 1: broadcast");  // compared before MPI sees it
    group.broadcast(tiny, 0).wait();
    group.all_reduce(real).wait();  // and the group is as good as before
    EXPECT_EQ(real[0].item<float>(), 2);
  });
}

TEST(MpiTest, WhatIsRejectedIsRejectedByNameBeforeAnythingTravels) {
  expect_passes(2, "MpiRejectionsChild.*", 1);
}

TEST(MpiTest, AProcessThatMpirunHasNotStartedIsToldSo) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  COHORT_EXPECT_THROW_WITH(make_group(store, 0, 2, "mpi", 1s), UsageError,
                           "[comm.mpi] a group of 2 ranks over MPI: this process was not started by mpirun");
}

TEST(MpiAloneChild, DISABLED_Run) {
  const Group group = make_group(c10::make_intrusive<c10d::HashStore>(), 0, 1, "mpi", 20s);
  at::Tensor tensor = at::ones({3});
  group.all_reduce(tensor).wait();
  EXPECT_EQ(tensor[0].item<float>(), 1);
}

// In a process of its own: MPI leaves variables behind.
TEST(MpiTest, OneRankAloneNeedsNoMpirun) {
  test::RankProcesses alone("MpiAloneChild", 1, test::with_leaks_of_mpi());
  EXPECT_EQ(alone.wait(), std::vector<int>{0}) << alone.output(0);
}

TEST(MpiTooFewChild, DISABLED_Run) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  COHORT_EXPECT_THROW_WITH(make_group(store, 0, 3, "mpi", 1s), UsageError,
                           "mpirun has started 2 process(es), and the group has 3 ranks");
}

TEST(MpiTest, AGroupOfMoreRanksThanMpirunHasStartedIsRejected) {
  expect_passes(2, "MpiTooFewChild.*", 1);
}

// How long a job with a fault may run; a rank that sleeps outlives even one that is ended from outside.
constexpr milliseconds kFaultTime = test::kSlowdown * 30s, kSleep = 4 * kFaultTime;

// What happens to a job when something happens to its rank 1: FAULT says what.
TEST(MpiFaultChild, DISABLED_Run) {
  std::ofstream(base::concat("pid ", ::getpid())) << "here";
  const std::string fault = std::getenv("FAULT");
  if (fault == "no start") {
    if (job_from_environment().rank == 1) ::raise(SIGSTOP);
    const base::Deadline waited(1500ms);
    try {
      on_ranks(3, [](Group&) {}, 1500ms, ConsistencyCheck::kOff);
    } catch (const TimeoutError& error) {
      EXPECT_LT(waited.elapsed(), 1500ms + test::deadline_slack());
      std::fprintf(stderr, "%s\n", error.what());
    }
    std::_Exit(testing::Test::HasFailure() ? 2 : 1);
  }
  on_ranks(
      3,
      [&](Group& group) {
        at::Tensor tensor = at::ones({3, 5});
        group.all_reduce(tensor).wait();
        if (group.rank() == 1) {
          if (fault == "kill") ::raise(SIGKILL);
          if (fault == "stop") ::raise(SIGSTOP);
          if (fault == "exit") std::exit(3);
          if (fault == "throw") throw std::runtime_error("rank 1 had enough");
          if (fault == "short") group.send(at::ones({3}), 0).wait();
          if (fault == "late" || fault == "nobody waits" || fault == "leave")
            std::this_thread::sleep_for(kSleep);
        }
        if (fault == "leave") return;
        if (fault == "empty part") {
          // Rank 1 has a row for rank 0, which expects none: it must not be what rank 0 gets next.
          at::Tensor output = at::zeros({0}), input = at::ones({group.rank() == 1 ? 1 : 0});
          std::vector<std::int64_t> received{0, 0, 0}, sent{group.rank() == 1 ? 1 : 0, 0, 0};
          const auto backend = group.process_group()->getBackend(c10::kCPU);
          backend->alltoall_base(output, input, received, sent)->wait();
          at::Tensor next = at::zeros({1});
          group.all_reduce(next).wait();
          return;
        }
        if (fault == "short") {
          at::Tensor five = at::zeros({5});
          if (group.rank() == 0) group.recv(five, 1).wait();
          return;
        }
        const bool has_ended = fault == "kill" || fault == "exit" || fault == "throw";  // mpirun sees that
        Pending pending = group.all_reduce(tensor, ReduceOp::SUM, {has_ended ? 20s : 1s});
        if (fault == "nobody waits") std::this_thread::sleep_for(kSleep);
        pending.wait();
      },
      fault == "leave" ? 8s : test::kSlowdown * 30s, ConsistencyCheck::kOff);
}

struct Fault {
  std::string name;
  int status;
  std::vector<const char*> words;
};
void PrintTo(const Fault& fault, std::ostream* out) {
  *out << fault.name;
}

class MpiFaultTest : public testing::TestWithParam<Fault> {};

TEST_P(MpiFaultTest, TheJobEndsInTimeSaysWhyAndLeavesNothing) {
  const auto begin = std::chrono::steady_clock::now();
  Ranks job(3, "MpiFaultChild.*", {{"FAULT", GetParam().name}});
  EXPECT_EQ(job.wait(2 * kFaultTime), GetParam().status) << job.output();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kFaultTime);
  for (const char* words : GetParam().words) EXPECT_TRUE(message_contains(job.output(), words));
  EXPECT_TRUE(test::comes_true([&] { return job.alive() == 0; })) << job.alive();
}

INSTANTIATE_TEST_SUITE_P(
    , MpiFaultTest,
    testing::Values(
        Fault{"late",
              1,
              {"[comm.mpi] all_reduce, call 1 of group 'world' (rank 0/3, float[3, 5]) timed out after ",
               "the job ends by MPI_Abort", "did not notice: dead, or stuck"}},
        Fault{"nobody waits",
              1,
              {"all_reduce, call 1 of group 'world'", "[comm.mpi] MPI_Abort: all_reduce, call 1"}},
        Fault{"no start", 1, {"ms for MPI_Init", "; rank 1 of 3 did not come to it"}},
        Fault{"stop", 1, {"all_reduce, call 1 of group 'world'", "MPI_Abort"}},
        Fault{"leave", 1, {"has ended well and waited 8000 ms for others to end"}},
        Fault{"empty part", 1, {"MPI_ERR_TRUNCATE"}},
        Fault{"short", 1, {"got 12 bytes from rank 1, expected 20"}}, Fault{"kill", 137, {"signal 9"}},
        Fault{"exit", 3, {"exited"}}, Fault{"throw", 1, {"rank 1 had enough"}}),
    [](const auto& info) {
      std::string name = info.param.name;
      std::erase(name, ' ');
      return name;
    });

}  // namespace
}  // namespace cohort::comm

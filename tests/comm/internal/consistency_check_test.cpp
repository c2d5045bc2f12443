#include "cohort/comm/internal/consistency_check.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>
#include <random>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/error.h"
#include "tests/support/messages.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using test::expect_in;
using test::run_ranks;

// What each rank was told when each made its own call, and that the group is usable afterwards.
std::vector<std::string> told(int size, const std::function<void(Group&)>& call,
                              ConsistencyCheck check_consistency = ConsistencyCheck::kFirst) {
  std::vector<std::string> messages(static_cast<std::size_t>(size));
  run_ranks(
      size, "gloo",
      [&](Group& group) {
        try {
          call(group);
        } catch (const UsageError& error) {
          messages[static_cast<std::size_t>(group.rank())] = error.what();
        }
        at::Tensor t = at::ones({1});
        group.all_reduce(t).wait();
        EXPECT_EQ(t.item<int>(), size) << "nothing of what was rejected may be left in the backend";
      },
      std::chrono::seconds(20), check_consistency);
  return messages;
}

TEST(CheckTest, DifferentCallsAreListedOnEveryRank) {
  const auto messages = told(3, [](Group& group) {
    at::Tensor t = at::ones({3, 4});
    group.all_reduce(t).wait();
    if (group.rank() == 1) {
      group.broadcast(t, 2).wait();
    } else {
      group.all_reduce(t, ReduceOp::MAX).wait();
    }
  });
  for (const std::string& message : messages) {
    expect_in(message,
              {"[comm.check_consistency] ranks of group 'world' call different things: ",
               "ranks 0 and 2: all_reduce 1 float[3, 4] MAX", "rank 1: broadcast 1 float[3, 4] from 2"});
  }
}

TEST(CheckTest, EveryPartOfACallIsCompared) {
  const auto differ = [](const std::function<void(Group&, bool)>& call,
                         std::initializer_list<const char*> parts) {
    for (const std::string& message : told(2, [&](Group& group) { call(group, group.rank() == 1); })) {
      expect_in(message, parts);
    }
  };
  at::NoGradGuard no_grad;
  differ(
      [](Group& group, bool odd) {
        at::Tensor t = at::ones(odd ? at::IntArrayRef({4, 3}) : at::IntArrayRef({3, 4}));
        group.all_reduce(t).wait();
      },
      {"rank 0: all_reduce 0 float[3, 4] SUM; rank 1: all_reduce 0 float[4, 3] SUM"});
  differ(
      [](Group& group, bool odd) {
        at::Tensor t = at::ones({2}, odd ? at::kInt : at::kFloat);
        group.all_reduce(t).wait();
      },
      {"rank 0: all_reduce 0 float[2]", "rank 1: all_reduce 0 int[2]"});
  differ(
      [](Group& group, bool odd) {
        at::Tensor t = at::ones({2});
        group.all_reduce(t, odd ? ReduceOp::MIN : ReduceOp::AVG).wait();
      },
      {"float[2] AVG", "float[2] MIN"});
  differ(
      [](Group& group, bool odd) {
        at::Tensor t = at::ones({2});
        group.broadcast(t, odd ? 1 : 0).wait();
      },
      {"float[2] from 0", "float[2] from 1"});
  differ(
      [](Group& group, bool odd) {
        std::vector<at::Tensor> tensors(odd ? 3 : 4, at::ones({2}));
        group.all_reduce(std::span(tensors)).wait();
      },
      {"float[2], float[2] and 2 more SUM", "float[2], float[2] and 1 more SUM"});
  differ(
      [](Group& group, bool odd) {
        at::Tensor t = at::ones({1, 1, 1, 1, 1, odd ? 2 : 1, 2});
        group.all_reduce(t).wait();
      },
      {"ranks 0 and 1: all_reduce 0 float[1, 1, 1, 1, 1, ...] SUM (shapes differ further on)"});
  differ(
      [](Group& group, bool odd) {
        const at::Tensor in = at::ones({odd ? 2 : 1});
        at::Tensor out = at::zeros({odd ? 4 : 2});
        group.all_gather(out, in).wait();
      },
      {"all_gather 0 float[1]", "all_gather 0 float[2]"});
  differ(
      [](Group& group, bool odd) {
        const at::Tensor in = at::ones({odd ? 4 : 2});
        at::Tensor out = at::zeros({odd ? 2 : 1});
        group.reduce_scatter(out, in).wait();
      },
      {"reduce_scatter 0 float[1] SUM", "reduce_scatter 0 float[2] SUM"});
}

TEST(CheckTest, RootsOfGatherAndScatterAndRowsOfAllToAllAreCompared) {
  const auto gathered = told(2, [](Group& group) {  // each thinks that it is the root
    std::vector<at::Tensor> outs(2, at::zeros({3}));
    group.gather(outs, at::ones({3}), group.rank()).wait();
  });
  const auto scattered = told(2, [](Group& group) {
    const std::vector<at::Tensor> ins(2, at::zeros({3}));
    at::Tensor out = at::ones({3});
    group.scatter(out, ins, group.rank()).wait();
  });
  const auto rows = told(2, [](Group& group) {  // rank 0 sends 1 row to rank 1, which waits for 2
    at::Tensor out = at::zeros({group.rank() == 0 ? 2 : 3, 2});
    const std::vector<std::int64_t> receives =
        group.rank() == 0 ? std::vector<std::int64_t>{1, 1} : std::vector<std::int64_t>{2, 1};
    group.all_to_all(out, at::ones({2, 2}), receives, {1, 1}).wait();
  });
  for (std::size_t rank = 0; rank < 2; ++rank) {
    expect_in(gathered[rank], {"rank 0: gather 0 float[3] to 0; rank 1: gather 0 float[3] to 1"});
    expect_in(scattered[rank], {"rank 0: scatter 0 float[3] from 0; rank 1: scatter 0 float[3] from 1"});
    expect_in(rows[rank], {"rank 0: all_to_all 0 float[2, 2], float[2, 2] rows 1+1 out, 1+1 in",
                           "rank 1: all_to_all 0 float[2, 2], float[3, 2] rows 1+1 out, 2+1 in"});
  }
}

TEST(CheckTest, MessagesBetweenTwoRanksAreNotComparedAndDoNotCount) {
  run_ranks(
      3, "gloo",
      [](Group& group) {
        at::Tensor t = at::full({2}, group.rank(), at::kFloat);
        if (group.rank() == 0) group.send(t, 1).wait();
        if (group.rank() == 1) group.recv(t, 0).wait();
        group.all_reduce(t).wait();
        EXPECT_EQ(t[0].item<float>(), 2);
      },
      std::chrono::seconds(20), ConsistencyCheck::kAlways);
}

// Whether collective `number` after `steps` steps is compared.
std::vector<bool> compared(ConsistencyCheck check,
                           std::initializer_list<std::pair<int, int>> number_and_steps) {
  std::vector<bool> result;
  Group::State state;
  state.size = 2;
  state.check_consistency = check;
  for (const auto& [number, steps] : number_and_steps) {
    state.steps = steps;
    result.push_back(state.checks(number));
  }
  return result;
}

TEST(CheckTest, TheFirstTenStepsOrTheFirstThousandCallsAreCompared) {
  const std::initializer_list<std::pair<int, int>> at = {{0, 0},    {999, 0},  {1000, 0},
                                                         {5000, 1}, {9999, 9}, {20, 10}};
  EXPECT_EQ(compared(ConsistencyCheck::kFirst, at),
            (std::vector<bool>{true, true, false, true, true, false}));
  EXPECT_EQ(compared(ConsistencyCheck::kAlways, at), std::vector<bool>(6, true));
  EXPECT_EQ(compared(ConsistencyCheck::kOff, at), std::vector<bool>(6, false));
}

TEST(CheckTest, ARankThatCountsStepsAloneIsToldBeforeTheOthersContinueWithoutIt) {
  const auto messages = told(2, [](Group& group) {
    at::Tensor t = at::ones({2});
    group.all_reduce(t).wait();
    if (group.rank() == 0) group.step_done();
    try {
      group.all_reduce(t).wait();
    } catch (const UsageError&) {
      if (group.rank() == 1) group.step_done();
      throw;
    }
  });
  for (const std::string& message : messages) {
    expect_in(message, {"rank 0: all_reduce 1 float[2] SUM after 1 steps", "after 0 steps",
                        "step_done() on every rank"});
  }
}

TEST(CheckTest, ARankThatDoesNotComeIsATimeoutThatNamesIt) {
  for (const ConsistencyCheck check : {ConsistencyCheck::kAlways, ConsistencyCheck::kOff}) {
    std::string message;
    run_ranks(
        3, "gloo",
        [&](Group& group) {
          group.barrier();  // who begins late is late to notice, too
          if (group.rank() == 2) {
            const base::Deadline deadline(std::chrono::seconds(20));
            while (group.store()->add("gave up", 0) < 2) {
              deadline.check("test", "the other ranks to give up");
              std::this_thread::sleep_for(milliseconds(5));
            }
            return;
          }
          at::Tensor t = at::ones({1});
          try {
            group.all_reduce(t, ReduceOp::SUM, {milliseconds(200)}).wait();
            ADD_FAILURE() << "nothing was thrown";
          } catch (const Error& error) {
            if (group.rank() == 0) message = error.what();
          }
          group.store()->add("gave up", 1);
        },
        std::chrono::seconds(20), check);
    expect_in(message, {"all_reduce 0 of group 'world' (rank 0/3, float[1], ", "rank 2 of 3 did not notice"});
  }
}

TEST(CheckTest, OverTheStoreTheSameIsFoundAndNothingStaysBehind) {
  run_ranks(3, "gloo", [](Group& group) {
    auto& state = *group.shared_state();
    state.device = c10::kCUDA;  // as if the tensors of this backend were on a GPU
    for (int i = 0; i < 5; ++i) {
      at::Tensor t = at::ones({2});
      group.all_reduce(t).wait();
    }
    at::Tensor t = at::ones({group.rank() == 1 ? 3 : 2});
    COHORT_EXPECT_THROW_WITH(group.all_reduce(t).wait(), UsageError,
                             "ranks 0 and 2: all_reduce 5 float[2] SUM; rank 1: all_reduce 5 float[3] SUM");
    EXPECT_EQ(state.compared.load(), 6);
    group.barrier();
    for (int round = 0; round < 6; ++round) {
      // Rank 0 leaves what it has collected.
      const std::string key = group.rank() == 0 ? "all" : std::to_string(group.rank());
      EXPECT_EQ(state.store->check({base::concat("check/", round, "/", key)}), round >= 4) << round;
    }
    state.device = c10::kCPU;
    group.barrier();
  });
  run_ranks(2, "gloo", [](Group& group) {
    auto& state = *group.shared_state();
    group.barrier();
    if (group.rank() == 0) {
      COHORT_EXPECT_THROW_WITH(gather_over_store(state, {}, base::Deadline(milliseconds(100))),
                               std::runtime_error, "timed out: rank 1 did not come");
    }
    group.barrier();
  });
}

// Random programs that are valid without a comparison are valid with it: each rank begins its collectives in
// their order but anywhere between its messages, and waits for each message at once. A message waits for
// those before it alone, so that nobody waits in a circle as long as collectives wait for nobody.
TEST(CheckTest, RanksMaySendBetweenCollectivesInAnyOrder) {
  constexpr int kRanks = 3, kPrograms = 15, kCollectives = 6, kMessages = 8;
  for (const char* backend : {"gloo", "shm"}) {
    SCOPED_TRACE(backend);
    run_ranks(
        kRanks, backend,
        [](Group& group) {
          for (int program = 0; program < kPrograms; ++program) {
            std::mt19937 common(static_cast<unsigned>(program));  // the same on every rank
            std::mt19937 own(static_cast<unsigned>(program * kRanks + group.rank()));
            std::vector<std::pair<int, int>> messages;
            for (int i = 0; i < kMessages; ++i) {
              const int from = static_cast<int>(common() % kRanks);
              messages.emplace_back(from, (from + 1 + static_cast<int>(common() % (kRanks - 1))) % kRanks);
            }
            std::vector<at::Tensor> tensors;
            std::vector<Pending> pending;
            const auto begin_collective = [&] {
              const auto number = static_cast<int>(tensors.size());
              tensors.push_back(at::full({5 + number}, group.rank() + number, at::kDouble));
              pending.push_back(number % 2 == 0 ? group.all_reduce(tensors.back())
                                                : group.broadcast(tensors.back(), number % kRanks));
            };
            for (int i = 0; i < kMessages; ++i) {
              while (tensors.size() < kCollectives && own() % 2 == 0) begin_collective();
              const auto [from, to] = messages[static_cast<std::size_t>(i)];
              at::Tensor message = at::full({3}, i, at::kDouble);
              if (group.rank() == from) group.send(message, to, i).wait();
              if (group.rank() != to) continue;
              message.zero_();
              group.recv(message, from, i).wait();
              ASSERT_EQ(message[2].item<int>(), i);
            }
            while (tensors.size() < kCollectives) begin_collective();
            for (int i = 0; i < kCollectives; ++i) {
              pending[static_cast<std::size_t>(i)].wait();
              const int expected = i % 2 == 0 ? 3 + 3 * i : i % kRanks + i;
              ASSERT_EQ(tensors[static_cast<std::size_t>(i)][0].item<int>(), expected) << program;
            }
          }
        },
        std::chrono::seconds(20), ConsistencyCheck::kAlways);
  }
}

TEST(CheckTest, ACallAfterOneThatDoesNotBeginEndsAtItsOwnDeadline) {
  run_ranks(2, "gloo", [](Group& group) {
    group.barrier();
    if (group.rank() == 0) {
      at::Tensor first = at::ones({2}), second = at::ones({3});
      Pending never = group.all_reduce(first, ReduceOp::SUM, {milliseconds(3000)});
      Pending later = group.all_reduce(second, ReduceOp::SUM, {milliseconds(200)});
      const base::Deadline since(milliseconds(0));
      EXPECT_FALSE(later.done());
      COHORT_EXPECT_THROW_WITH(later.wait(), TimeoutError, "all_reduce 1 of group 'world'");
      EXPECT_LT(since.elapsed(), milliseconds(2700)) << "before the first one's deadline";
      COHORT_EXPECT_THROW_WITH(never.wait(), TimeoutError, "all_reduce 0 of group 'world'");
      COHORT_EXPECT_THROW_WITH(group.all_reduce(second), CommError, "all_reduce 1");
    }
    group.barrier({milliseconds(20'000)});
  });
}

// What is begun on c10d's group lies between the same calls on every rank.
TEST(CheckTest, TheProcessGroupIsNotGivenOutBeforeCallsThatHaveNotBegun) {
  run_ranks(2, "gloo", [](Group& group) {
    group.shared_state()->timeout = milliseconds(300);
    if (group.rank() == 0) {
      at::Tensor t = at::ones({4});
      Pending pending = group.all_reduce(t, ReduceOp::SUM, {milliseconds(2000)});
      COHORT_EXPECT_THROW_WITH(group.process_group(), TimeoutError,
                               "calls that were made before have not begun");
      EXPECT_THROW(pending.wait(), Error);
    }
    group.barrier({milliseconds(20000)});
  });
}

TEST(CheckTest, CallsOfC10dKeepTheirPlace) {
  run_ranks(2, "gloo", [](Group& group) {
    for (int i = 0; i < 20; ++i) {
      at::Tensor ours = at::full({4}, 1), theirs = at::full({4}, 10), last = at::full({4}, 100);
      Pending pending = group.all_reduce(ours);
      std::vector<at::Tensor> list{theirs};
      const auto work = group.process_group()->allreduce(list);
      Pending after = group.all_reduce(last);
      after.wait();
      work->wait();
      pending.wait();
      ASSERT_EQ(ours[0].item<int>(), 2) << i;
      ASSERT_EQ(theirs[0].item<int>(), 20) << i;
      ASSERT_EQ(last[0].item<int>(), 200) << i;
    }
  });
}

}  // namespace
}  // namespace cohort::comm

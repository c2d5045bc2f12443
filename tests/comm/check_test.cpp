#include "cohort/comm/check.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "cohort/core/error.h"
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
                              Check check = Check::kFirst) {
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
        EXPECT_EQ(t.item<int>(), size) << "nothing of what was refused may be left in the backend";
      },
      std::chrono::seconds(20), check);
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
              {"[comm.check] ranks of group 'world' call different things: ",
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
      std::chrono::seconds(20), Check::kAlways);
}

// Whether collective `number` after `steps` steps is compared.
std::vector<bool> compared(Check check, std::initializer_list<std::pair<int, int>> number_and_steps) {
  std::vector<bool> result;
  Group::State state;
  state.size = 2;
  state.check = check;
  for (const auto& [number, steps] : number_and_steps) {
    state.steps = steps;
    result.push_back(state.checks(number));
  }
  return result;
}

TEST(CheckTest, TheFirstTenStepsOrTheFirstThousandCallsAreCompared) {
  const std::initializer_list<std::pair<int, int>> at = {{0, 0},    {999, 0},  {1000, 0},
                                                         {5000, 1}, {9999, 9}, {20, 10}};
  EXPECT_EQ(compared(Check::kFirst, at), (std::vector<bool>{true, true, false, true, true, false}));
  EXPECT_EQ(compared(Check::kAlways, at), std::vector<bool>(6, true));
  EXPECT_EQ(compared(Check::kOff, at), std::vector<bool>(6, false));
}

TEST(CheckTest, ARankThatCountsStepsAloneIsToldBeforeTheOthersGoOnWithoutIt) {
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
  for (const Check check : {Check::kAlways, Check::kOff}) {
    std::string message;
    run_ranks(
        3, "gloo",
        [&](Group& group) {
          if (group.rank() == 2) {
            const core::Deadline deadline(std::chrono::seconds(20));
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
    COHORT_EXPECT_THROW_WITH(group.all_reduce(t), UsageError,
                             "ranks 0 and 2: all_reduce 5 float[2] SUM; rank 1: all_reduce 5 float[3] SUM");
    EXPECT_EQ(state.compared.load(), 6);
    group.barrier();
    for (int round = 0; round < 6; ++round) {
      EXPECT_EQ(state.store->check({core::concat("check/", round, "/", group.rank())}), round >= 4) << round;
    }
    state.device = c10::kCPU;
    group.barrier();
  });
  run_ranks(2, "gloo", [](Group& group) {
    auto& state = *group.shared_state();
    group.barrier();
    if (group.rank() == 0) {
      COHORT_EXPECT_THROW_WITH(gather_over_store(state, {}, core::Deadline(milliseconds(100))),
                               std::runtime_error, "timed out: rank 1 did not come");
    }
    group.barrier();
  });
}

}  // namespace
}  // namespace cohort::comm

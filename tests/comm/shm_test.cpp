// The backend shm as c10d and Group see it; what it does is tested in tests/comm/shm.
#include "cohort/comm/backends/shm/shm.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/error.h"
#include "cohort/comm/init.h"
#include "tests/support/comes_true.h"
#include "tests/support/processes.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::run_ranks;

at::Tensor numbers_of(int rank, std::int64_t numel) {
  return at::sin(at::arange(numel, at::kFloat) * static_cast<double>(1 + rank));
}

TEST(SharedTensorTest, IsATensorLikeAnyOther) {
  at::Tensor tensor = shared_empty({3, 5}, at::kDouble);
  EXPECT_TRUE(is_shared(tensor));
  EXPECT_EQ(tensor.sizes(), (std::vector<std::int64_t>{3, 5}));
  EXPECT_EQ(tensor.scalar_type(), at::kDouble);
  EXPECT_TRUE(is_shared(tensor.view({-1}).slice(0, 2, 9)));
  EXPECT_FALSE(is_shared(tensor + 1));
  EXPECT_FALSE(is_shared(at::empty({3})));
  EXPECT_TRUE(shared_empty({2}, at::TensorOptions().requires_grad(true)).requires_grad());
  EXPECT_EQ(shared_empty({0}).numel(), 0);
  COHORT_EXPECT_THROW_WITH(shared_empty({2}, at::TensorOptions(at::kMeta)), UsageError,
                           "is on the CPU, not on meta");
}

TEST(ShmBackendTest, HoldsGloosBitsWithTwoRanksAndThoseOfSharedTensors) {
  for (const std::int64_t numel : {1, 1000, 100'003}) {
    for (const ReduceOp::RedOpType op : {ReduceOp::SUM, ReduceOp::AVG}) {
      std::vector<at::Tensor> results;
      std::mutex mutex;
      for (const auto& [backend, shared] :
           {std::pair("gloo", false), std::pair("shm", false), std::pair("shm", true)}) {
        run_ranks(2, backend, [&, shared = shared](Group& group) {
          at::Tensor tensor = numbers_of(group.rank(), numel);
          if (shared) tensor = shared_empty({numel}).copy_(tensor);
          group.all_reduce(tensor, op).wait();
          const std::lock_guard lock(mutex);
          results.push_back(tensor.clone());
        });
      }
      ASSERT_EQ(results.size(), 6U);
      for (const at::Tensor& result : results) EXPECT_TRUE(at::equal(result, results[0])) << numel;
    }
  }
}

TEST(ShmBackendTest, SumsScaledByAFactorOfEachRank) {
  run_ranks(3, "shm", [](Group& group) {
    const auto op = [&] { return c10d::makePreMulSum<double>(group.rank() + 1.0); };
    at::Tensor tensor = at::full({1000}, 2.0);
    group.all_reduce(tensor, op()).wait();
    EXPECT_TRUE(tensor.eq(12).all().item<bool>());  // 2 (1 + 2 + 3)
    at::Tensor input = at::full({6}, 1.0), output = at::empty({2});
    group.reduce_scatter(output, input, op()).wait();
    EXPECT_TRUE(output.eq(6).all().item<bool>());
    EXPECT_TRUE(input.eq(1).all().item<bool>()) << "an input was changed";
    at::Tensor factor = at::full({1}, 10.0F), other = at::ones({4});
    group.all_reduce(other, c10d::makePreMulSum<at::Tensor>(factor)).wait();
    EXPECT_TRUE(other.eq(30).all().item<bool>());
  });
}

TEST(ShmBackendTest, ComplexNumbersAreSummedAveragedAndMultiplied) {
  for (const at::ScalarType dtype : {at::kComplexFloat, at::kComplexDouble}) {
    run_ranks(3, "shm", [dtype](Group& group) {
      const auto filled = [&](double real, double imag) {
        return at::complex(at::full({5}, real), at::full({5}, imag)).to(dtype);
      };
      at::Tensor sum = filled(1, group.rank()), average = sum.clone(), product = sum.clone();
      group.all_reduce(sum).wait();
      EXPECT_TRUE(at::equal(sum, filled(3, 3)));
      group.all_reduce(average, ReduceOp::AVG).wait();
      EXPECT_TRUE(at::equal(average, filled(1, 1)));
      group.all_reduce(product, ReduceOp::PRODUCT).wait();
      EXPECT_TRUE(at::equal(product, filled(-1, 3)));  // (1 + i) (1 + 2i)
    });
  }
}

TEST(ShmBackendTest, FormsOfC10dThatGroupDoesNotCall) {
  run_ranks(3, "shm", [](Group& group) {
    const auto& c10d_group = group.process_group();
    const int n = group.size(), rank = group.rank();
    const auto filled = [](std::int64_t numel, int value) { return at::full({numel}, value, at::kInt); };

    std::vector<at::Tensor> inputs{filled(4, rank)};
    std::vector<std::vector<at::Tensor>> lists(1);
    for (int r = 0; r < n; ++r) lists[0].push_back(filled(4, -1));
    c10d_group->allgather(lists, inputs)->wait();
    for (int r = 0; r < n; ++r) EXPECT_TRUE(lists[0][static_cast<std::size_t>(r)].eq(r).all().item<bool>());

    std::vector<at::Tensor> two{filled(3, rank), filled(5, 10 + rank)};
    std::vector<std::vector<at::Tensor>> of_ranks;
    for (int r = 0; r < n; ++r) of_ranks.push_back({filled(3, -1), filled(5, -1)});
    c10d_group->allgather_coalesced(of_ranks, two)->wait();
    for (int r = 0; r < n; ++r) {
      EXPECT_TRUE(of_ranks[static_cast<std::size_t>(r)][0].eq(r).all().item<bool>());
      EXPECT_TRUE(of_ranks[static_cast<std::size_t>(r)][1].eq(10 + r).all().item<bool>());
    }

    std::vector<at::Tensor> outputs{filled(4, -1)};
    for (int r = 0; r < n; ++r) lists[0][static_cast<std::size_t>(r)] = filled(4, rank + r);
    c10d_group->reduce_scatter(outputs, lists)->wait();
    EXPECT_TRUE(outputs[0].eq(3 + 3 * rank).all().item<bool>());

    const auto& backend = c10d_group->getBackend(c10::kCPU);
    std::vector<at::Tensor> wholes{filled(3 * 2, 1), filled(3 * 7, 2)}, parts{filled(2, 0), filled(7, 0)};
    backend->reduce_scatter_tensor_coalesced(parts, wholes)->wait();
    EXPECT_TRUE(parts[0].eq(3).all().item<bool>() && parts[1].eq(6).all().item<bool>());
    backend->allgather_into_tensor_coalesced(wholes, parts)->wait();
    EXPECT_TRUE(wholes[0].eq(3).all().item<bool>() && wholes[1].eq(6).all().item<bool>());

    std::vector<at::Tensor> out, in;
    for (int r = 0; r < n; ++r) {
      in.push_back(filled(rank + 1, 10 * rank + r));
      out.push_back(filled(r + 1, -1));
    }
    c10d_group->alltoall(out, in)->wait();
    for (int r = 0; r < n; ++r)
      EXPECT_TRUE(out[static_cast<std::size_t>(r)].eq(10 * r + rank).all().item<bool>());

    if (rank == 0) {
      for (int i = 1; i < n; ++i) {
        std::vector<at::Tensor> got{filled(2, -1)};
        const auto work = c10d_group->recvAnysource(got, 5);
        work->wait();
        EXPECT_TRUE(got[0].eq(work->sourceRank()).all().item<bool>());
      }
    } else {
      std::vector<at::Tensor> message{filled(2, rank)};
      c10d_group->send(message, 0, 5)->wait();
    }
    backend->monitoredBarrier({}, true);
    EXPECT_EQ(backend->getBackendName(), "shm");
    EXPECT_GT(backend->getSequenceNumberForGroup(), 0U);
    EXPECT_TRUE(is_shared(backend->allocateTensor(10, at::kFloat)));
    EXPECT_TRUE(is_shared(group.empty({2, 3})));
    EXPECT_EQ(group.empty({2, 3}, at::kLong).scalar_type(), at::kLong);
  });
}

TEST(ShmBackendTest, WorkHasAFutureAndCanBePolled) {
  run_ranks(2, "shm", [](Group& group) {
    for (const std::int64_t numel : {10, 500'000}) {
      std::vector<at::Tensor> list{at::ones({numel})};
      const auto work = group.process_group()->allreduce(list);
      const auto future = work->getFuture();
      std::atomic<bool> told{false};
      future->addCallback([&](c10::ivalue::Future& done) {
        told = done.value().toTensorVector()[0][numel - 1].item<float>() == 2;
      });
      future->wait();
      EXPECT_TRUE(work->isCompleted() && work->isSuccess());
      const base::Deadline deadline(seconds(10));
      while (!told) deadline.check("test", "the callback");

      std::vector<at::Tensor> polled{at::ones({numel})};
      const auto other = group.process_group()->allreduce(polled);
      while (!other->isCompleted()) deadline.check("test", "the end");
      EXPECT_EQ(polled[0][0].item<float>(), 2);
    }
  });
}

TEST(ShmBackendTest, WhatItCannotDoIsRejectedByNameBeforeAnythingTravels) {
  run_ranks(2, "shm", [](Group& group) {
    at::Tensor complex = at::ones({3}, at::kComplexFloat), ints = at::ones({3}, at::kInt),
               floats = at::ones({3}), truth = at::ones({3}, at::kBool);
    COHORT_EXPECT_THROW_WITH(group.all_reduce(complex, ReduceOp::MAX).wait(), UsageError,
                             "Backend shm: all_reduce does not support MAX of ComplexFloat");
    COHORT_EXPECT_THROW_WITH(group.all_reduce(floats, ReduceOp::BAND).wait(), UsageError,
                             "Backend shm: all_reduce does not support BAND of Float");
    COHORT_EXPECT_THROW_WITH(group.all_reduce(truth, ReduceOp::AVG).wait(), UsageError,
                             "Backend shm: all_reduce does not support AVG of Bool");
    COHORT_EXPECT_THROW_WITH(group.send(ints, group.rank()), UsageError, "cannot send to itself");
    std::vector<at::Tensor> strided{at::ones({4, 4}).t().slice(0, 0, 2)};
    COHORT_EXPECT_THROW_WITH(
        group.process_group()->allreduce(strided), c10::Error,
        "Backend shm: all_reduce: got a tensor of strides [1, 4], expected a contiguous one");
    group.all_reduce(ints).wait();  // the group can be used on
    EXPECT_EQ(ints[0].item<int>(), 2);
    group.all_reduce(truth, ReduceOp::MIN).wait();
    EXPECT_TRUE(truth.all().item<bool>());
  });
}

TEST(ShmBackendTest, ErrorsNameCallGroupAndRank) {
  std::atomic<bool> has_failed{false};
  run_ranks(
      2, "shm",
      [&](Group& group) {
        if (group.rank() == 1) return test::wait_until([&] { return has_failed.load(); });
        at::Tensor tensor = at::ones({3, 5});
        COHORT_EXPECT_THROW_WITH(
            group.all_reduce(tensor, ReduceOp::SUM, {.timeout = milliseconds(300)}).wait(), TimeoutError,
            "all_reduce 0 of group 'world' (rank 0/2, float[3, 5]");
        COHORT_EXPECT_THROW_WITH(group.all_reduce(tensor), CommError, "rank 1 has not come");
        has_failed = true;
      },
      seconds(20), ConsistencyCheck::kOff);
  run_ranks(
      2, "shm",
      [](Group& group) {
        at::Tensor tensor = at::ones({3 + group.rank()});
        COHORT_EXPECT_THROW_WITH(group.all_reduce(tensor).wait(), Error, "ranks call different things");
      },
      seconds(20), ConsistencyCheck::kOff);
}

// ------------------------------------------------------------------------------------------- as processes

TEST(ShmJobChild, DISABLED_SumsSharedTensorsAndMessages) {
  Group group = init_process_group({.timeout = seconds(30)});
  ASSERT_EQ(group.backend(), "shm") << "auto";
  for (const std::int64_t numel : {10, 100'000, 1'000'003}) {
    at::Tensor shared = shared_empty({numel}), own = numbers_of(group.rank(), numel);
    shared.copy_(own);
    group.all_reduce(shared).wait();
    group.all_reduce(own).wait();
    ASSERT_TRUE(at::equal(shared, own)) << numel;
    at::Tensor expected = numbers_of(0, numel);
    for (int rank = 1; rank < group.size(); ++rank) expected += numbers_of(rank, numel);
    ASSERT_TRUE(at::equal(own, expected)) << numel;
  }
  const Group half = group.subgroup({0, 2});
  if (half) {
    at::Tensor tensor = shared_empty({50'000}).fill_(group.rank());
    half.all_reduce(tensor).wait();
    ASSERT_TRUE(tensor.eq(2).all().item<bool>());
  }
  group.barrier();
  std::puts("all is well");
}

TEST(ShmJobTest, RanksThatAreProcessesMapEachOthersTensors) {
  test::RankProcesses ranks("ShmJobChild", 3);
  EXPECT_EQ(ranks.wait(), (std::vector<int>{0, 0, 0}))
      << ranks.output(0) << ranks.output(1) << ranks.output(2);
  for (int rank = 0; rank < 3; ++rank) EXPECT_NE(ranks.output(rank).find("all is well"), std::string::npos);
}

}  // namespace
}  // namespace cohort::comm

// The same calls on every backend: collectives x types x operations x sizes x ranks. What a backend rejects
// is listed here by name, so that neither a rejection nor a new ability goes unnoticed.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <mutex>
#include <set>

#include "cohort/base/error.h"
#include "tests/support/ranks.h"

namespace cohort::comm {
namespace {

using RedOpType = ReduceOp::RedOpType;

const std::vector<std::pair<RedOpType, const char*>> kReductions = {
    {ReduceOp::SUM, "SUM"}, {ReduceOp::AVG, "AVG"},  {ReduceOp::PRODUCT, "PRODUCT"},
    {ReduceOp::MIN, "MIN"}, {ReduceOp::MAX, "MAX"},  {ReduceOp::BAND, "BAND"},
    {ReduceOp::BOR, "BOR"}, {ReduceOp::BXOR, "BXOR"}};
const std::vector<at::ScalarType> kNumbers = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                              at::kChar,  at::kByte,   at::kInt,  at::kLong};
const std::vector<std::int64_t> kSizes = {0, 1, 5, 1003};

// Small whole numbers, exact in every type. With `fake` all ranks hold the same.
at::Tensor input(const std::string& backend, int rank, std::int64_t size, at::ScalarType dtype) {
  const int who = backend == "fake" ? 0 : rank;
  return at::arange(size, at::kLong).mul(7).add(3 * who).remainder(5).add(1).to(dtype);
}

std::vector<at::Tensor> inputs(const Group& group, std::int64_t size, at::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < group.size(); ++rank) all.push_back(input(group.backend(), rank, size, dtype));
  return all;
}

bool is_bitwise(RedOpType op) {
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}

// LibTorch's gloo divides in place by a floating-point number, which fails.
bool averages_whole_numbers(const std::string& backend) {
  return backend != "gloo";
}

at::Tensor reduced(const std::vector<at::Tensor>& all, RedOpType op) {
  const at::ScalarType dtype = all[0].scalar_type();
  at::Tensor result = all[0].to(at::isFloatingType(dtype) ? at::kDouble : at::kLong);
  for (std::size_t i = 1; i < all.size(); ++i) {
    const at::Tensor other = all[i].to(result.scalar_type());
    switch (op) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
        result = result + other;
        break;
      case ReduceOp::PRODUCT:
        result = result * other;
        break;
      case ReduceOp::MIN:
        result = at::minimum(result, other);
        break;
      case ReduceOp::MAX:
        result = at::maximum(result, other);
        break;
      case ReduceOp::BAND:
        result = at::bitwise_and(result, other);
        break;
      case ReduceOp::BOR:
        result = at::bitwise_or(result, other);
        break;
      default:
        result = at::bitwise_xor(result, other);
    }
  }
  if (op == ReduceOp::AVG) result = result / static_cast<double>(all.size());
  return result.to(dtype);  // an average of whole numbers is rounded towards zero
}

// Averages are rounded once in the type; all else is exact.
void expect_equal(const at::Tensor& got, const at::Tensor& expected, RedOpType op, const std::string& what) {
  if (op == ReduceOp::AVG && at::isFloatingType(got.scalar_type())) {
    EXPECT_TRUE(at::allclose(got.to(at::kDouble), expected.to(at::kDouble), 8e-3, 0)) << what;
  } else {
    EXPECT_TRUE(at::equal(got, expected)) << what << "\ngot " << got << "\nexpected " << expected;
  }
}

class ConformanceTest : public testing::TestWithParam<std::tuple<const char*, int>> {
 protected:
  std::string backend() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }
  void run(const std::function<void(Group&)>& body) { test::run_ranks(size(), backend(), body); }
};

// "AVG of int" and the like, where UsageError said so before anything travelled.
std::set<std::string> rejections(
    const std::string& backend, int size, const std::function<Pending(Group&, at::Tensor&, RedOpType)>& call,
    const std::function<void(const Group&, const at::Tensor&, RedOpType, std::int64_t)>& check) {
  std::set<std::string> rejected;
  for (const at::ScalarType dtype : kNumbers) {
    for (const auto& [op, name] : kReductions) {
      if (is_bitwise(op) && at::isFloatingType(dtype)) continue;  // means nothing
      if (op == ReduceOp::AVG && !averages_whole_numbers(backend) && !at::isFloatingType(dtype)) continue;
      try {
        test::run_ranks(size, backend, [&, op = op](Group& group) {
          for (const std::int64_t numel : kSizes) {
            at::Tensor tensor = input(backend, group.rank(), numel, dtype);
            call(group, tensor, op).wait();
            check(group, tensor, op, numel);
          }
        });
      } catch (const UsageError&) {
        rejected.insert(std::string(name) + " of " + c10::toString(dtype));
      }
    }
  }
  return rejected;
}

TEST_P(ConformanceTest, AllReduce) {
  const auto rejected = rejections(
      backend(), size(),
      [](Group& group, at::Tensor& tensor, RedOpType op) { return group.all_reduce(tensor, op); },
      [](const Group& group, const at::Tensor& tensor, RedOpType op, std::int64_t numel) {
        expect_equal(tensor, reduced(inputs(group, numel, tensor.scalar_type()), op), op,
                     base::concat("op ", int(op), " of ", tensor.dtype().name(), ", ", numel, " numbers"));
      });
  EXPECT_EQ(rejected, std::set<std::string>{});
}

TEST_P(ConformanceTest, Reduce) {
  const auto rejected = rejections(
      backend(), size(),
      [](Group& group, at::Tensor& tensor, RedOpType op) {
        return group.reduce(tensor, group.size() - 1, op);
      },
      [](const Group& group, const at::Tensor& tensor, RedOpType op, std::int64_t numel) {
        if (group.rank() != group.size() - 1) return;
        expect_equal(tensor, reduced(inputs(group, numel, tensor.scalar_type()), op), op, "reduce");
      });
  EXPECT_EQ(rejected, std::set<std::string>{});
}

TEST_P(ConformanceTest, ReduceScatter) {
  for (const at::ScalarType dtype : kNumbers) {
    for (const RedOpType op : {ReduceOp::SUM, ReduceOp::MAX}) {
      run([&](Group& group) {
        for (const std::int64_t part : kSizes) {
          const std::int64_t whole = part * group.size();
          at::Tensor output = at::zeros({part}, dtype);
          group.reduce_scatter(output, input(group.backend(), group.rank(), whole, dtype), op).wait();
          expect_equal(output, reduced(inputs(group, whole, dtype), op).narrow(0, part * group.rank(), part),
                       op, base::concat("reduce_scatter of ", output.dtype().name(), ", ", part));
        }
      });
    }
  }
}

TEST_P(ConformanceTest, AveragesOfWholeNumbersDoNotWrapAndAreRoundedTowardsZero) {
  if (!averages_whole_numbers(backend())) return;
  run([&](Group& group) {
    const auto average = [&](at::ScalarType dtype, std::int64_t number) {
      at::Tensor tensor = at::full({1003}, number, dtype);
      group.all_reduce(tensor, ReduceOp::AVG).wait();
      EXPECT_TRUE(tensor.eq(tensor[0]).all().item<bool>());
      return tensor[0].item<std::int64_t>();
    };
    EXPECT_EQ(average(at::kChar, 127), 127);
    EXPECT_EQ(average(at::kByte, 255), 255);
    EXPECT_EQ(average(at::kShort, -32768), -32768);
    EXPECT_EQ(average(at::kInt, 2147483647), 2147483647);
    std::int64_t sum = 0;
    for (int rank = 0; rank < group.size(); ++rank) sum -= 2 + (backend() == "fake" ? group.rank() : rank);
    for (const at::ScalarType dtype : {at::kChar, at::kShort, at::kInt, at::kLong}) {
      EXPECT_EQ(average(dtype, -2 - group.rank()), sum / group.size()) << dtype;
    }
  });
}

TEST_P(ConformanceTest, BroadcastAllGatherGatherAndScatter) {
  std::vector<at::ScalarType> types = kNumbers;
  types.push_back(at::kBool);
  for (const at::ScalarType dtype : types) {
    run([&](Group& group) {
      for (const std::int64_t numel : kSizes) {
        const std::string what = base::concat(c10::toString(dtype), ", ", numel);
        const std::vector<at::Tensor> all = inputs(group, numel, dtype);
        const auto own_rank = static_cast<std::size_t>(group.rank());
        const int root = group.size() - 1;

        at::Tensor sent = all[own_rank].clone();
        group.broadcast(sent, root).wait();
        EXPECT_TRUE(at::equal(sent, all[static_cast<std::size_t>(root)])) << "broadcast of " << what;

        at::Tensor gathered = at::zeros({group.size() * numel}, dtype);
        group.all_gather(gathered, all[own_rank]).wait();
        EXPECT_TRUE(at::equal(gathered, at::cat(all))) << "all_gather of " << what;

        std::vector<at::Tensor> parts;
        if (group.rank() == root) {
          for (int rank = 0; rank < group.size(); ++rank) parts.push_back(at::zeros({numel}, dtype));
        }
        group.gather(parts, all[own_rank], root).wait();
        for (std::size_t rank = 0; rank < parts.size(); ++rank) {
          EXPECT_TRUE(at::equal(parts[rank], all[rank])) << "gather of " << what;
        }

        at::Tensor got = all[own_rank].clone();
        group
            .scatter(got,
                     group.rank() == root ? std::span<const at::Tensor>(all) : std::span<const at::Tensor>(),
                     root)
            .wait();
        EXPECT_TRUE(at::equal(got, all[own_rank])) << "scatter of " << what;
      }
    });
  }
}

TEST_P(ConformanceTest, ComplexNumbersMoveAndAreSummed) {
  using CollectiveCall = std::function<void(Group&, at::Tensor&)>;
  const std::vector<std::pair<const char*, CollectiveCall>> calls = {
      {"broadcast", [](Group& g, at::Tensor& t) { g.broadcast(t, 0).wait(); }},
      {"all_reduce", [](Group& g, at::Tensor& t) { g.all_reduce(t).wait(); }},
      {"all_gather",
       [](Group& g, at::Tensor& t) {
         at::Tensor all = at::zeros({g.size() * t.numel()}, t.options());
         g.all_gather(all, t).wait();
         EXPECT_TRUE(at::equal(all.narrow(0, g.rank() * t.numel(), t.numel()), t));
       }},
      {"all_to_all", [](Group& g, at::Tensor& t) {
         at::Tensor in = t.repeat({g.size()}), out = at::zeros_like(in);
         g.all_to_all(out, in).wait();
         EXPECT_TRUE(at::equal(out.narrow(0, g.rank() * t.numel(), t.numel()), t));
       }}};
  std::set<std::string> rejected;
  for (const auto& [name, call] : calls) {
    try {
      run([&, call = call](Group& group) {
        at::Tensor tensor = at::complex(at::arange(6, at::kFloat), at::full({6}, group.rank(), at::kFloat));
        call(group, tensor);
      });
    } catch (const UsageError&) {
      rejected.insert(name);
    }
  }
  EXPECT_EQ(rejected, std::set<std::string>{});
}

TEST_P(ConformanceTest, AllToAllWithEqualAndUnequalParts) {
  run([&](Group& group) {
    const int n = group.size();
    const bool fake = group.backend() == "fake";
    // Row r of rank q's input is (q, r): afterwards row q here is (q, own rank).
    const auto rows = [&](int rank) {
      return at::stack({at::full({n}, fake ? group.rank() : rank, at::kFloat), at::arange(n, at::kFloat)}, 1);
    };
    at::Tensor output = at::zeros({n, 2});
    group.all_to_all(output, rows(group.rank())).wait();
    for (int from = 0; from < n; ++from) {
      EXPECT_EQ(output[from][0].item<int>(), fake ? group.rank() : from);
      EXPECT_EQ(output[from][1].item<int>(), group.rank());
    }
    if (fake) return;
    // Rank q sends r + 1 rows to rank r.
    std::vector<std::int64_t> sends, receives;
    for (int r = 0; r < n; ++r) {
      sends.push_back(r + 1);
      receives.push_back(group.rank() + 1);
    }
    at::Tensor in = at::full({n * (n + 1) / 2, 3}, group.rank(), at::kInt);
    at::Tensor out = at::full({n * (group.rank() + 1), 3}, -1, at::kInt);
    group.all_to_all(out, in, receives, sends).wait();
    for (int from = 0; from < n; ++from) {
      EXPECT_TRUE(out.narrow(0, from * (group.rank() + 1), group.rank() + 1).eq(from).all().item<bool>());
    }
  });
}

TEST_P(ConformanceTest, SendAndReceiveInARing) {
  if (size() == 1 || backend() == "fake") return;
  run([&](Group& group) {
    const int next = (group.rank() + 1) % group.size(),
              before = (group.rank() + group.size() - 1) % group.size();
    for (const std::int64_t numel : {std::int64_t{1}, std::int64_t{1003}}) {
      const at::Tensor own_input = input(group.backend(), group.rank(), numel, at::kFloat);
      at::Tensor got = at::zeros({numel});
      Pending sent = group.send(own_input, next, 3);
      group.recv(got, before, 3).wait();
      sent.wait();
      EXPECT_TRUE(at::equal(got, input(group.backend(), before, numel, at::kFloat)));
    }
  });
}

TEST_P(ConformanceTest, ViewsThatAreNotContiguousAreReadAndWrittenInPlace) {
  run([&](Group& group) {
    at::Tensor base = at::zeros({6, 4});
    at::Tensor view = base.t().slice(1, 0, 6, 2);  // [4, 3], strided both ways
    view.copy_(input(group.backend(), group.rank(), 12, at::kFloat).view({4, 3}));
    group.all_reduce(view).wait();
    const at::Tensor expected = reduced(inputs(group, 12, at::kFloat), ReduceOp::SUM).view({4, 3});
    EXPECT_TRUE(at::equal(view, expected));
    EXPECT_TRUE(at::equal(base.t().slice(1, 0, 6, 2), expected)) << "the view's own memory was not written";
    EXPECT_EQ(base.t().slice(1, 1, 6, 2).abs().sum().item<float>(), 0)
        << "beside the view something was written";

    at::Tensor wide = at::zeros({2, 3 * group.size()}).t();
    group.all_gather(wide, at::full({3, 2}, group.rank(), at::kFloat).t()).wait();
    EXPECT_EQ(wide.select(0, 3 * group.size() - 1)[1].item<int>(),
              group.backend() == "fake" ? group.rank() : group.size() - 1);
  });
}

TEST_P(ConformanceTest, SeveralTensorsGoAsOne) {
  run([&](Group& group) {
    std::vector<at::Tensor> tensors;
    for (const std::int64_t numel : {std::int64_t{3}, std::int64_t{1}, std::int64_t{1003}}) {
      tensors.push_back(input(group.backend(), group.rank(), numel, at::kFloat));
    }
    group.all_reduce(std::span(tensors), ReduceOp::SUM).wait();
    for (const at::Tensor& tensor : tensors) {
      EXPECT_TRUE(at::equal(tensor, reduced(inputs(group, tensor.numel(), at::kFloat), ReduceOp::SUM)));
    }
  });
}

TEST_P(ConformanceTest, ManyAtOnceEndInAnyOrder) {
  run([&](Group& group) {
    std::vector<at::Tensor> tensors;
    std::vector<Pending> pending;
    for (int i = 0; i < 20; ++i) tensors.push_back(at::full({100 + i}, group.rank() + i, at::kFloat));
    for (at::Tensor& tensor : tensors) pending.push_back(group.all_reduce(tensor, ReduceOp::MAX));
    for (std::size_t i = pending.size(); i-- > 0;) pending[i].wait();
    for (int i = 0; i < 20; ++i) {
      const int top = group.backend() == "fake" ? group.rank() : group.size() - 1;
      EXPECT_TRUE(tensors[static_cast<std::size_t>(i)].eq(top + i).all().item<bool>());
    }
    group.barrier();
  });
}

TEST_P(ConformanceTest, AllRanksAndAllRunsHoldTheSameBits) {
  std::vector<at::Tensor> results;
  std::mutex mutex;
  for (int round = 0; round < 2; ++round) {
    run([&](Group& group) {
      at::Tensor tensor =
          at::sin(at::arange(10007, at::kFloat) * (1 + (backend() == "fake" ? 0 : group.rank())));
      group.all_reduce(tensor).wait();
      at::Tensor all = at::zeros({group.size(), tensor.numel()});
      group.all_gather(all, tensor).wait();
      for (int rank = 0; rank < group.size(); ++rank) EXPECT_TRUE(at::equal(all[rank], tensor));
      const std::lock_guard lock(mutex);
      results.push_back(tensor);
    });
  }
  for (const at::Tensor& result : results) EXPECT_TRUE(at::equal(result, results[0]));
}

INSTANTIATE_TEST_SUITE_P(Backends, ConformanceTest,
                         testing::Combine(testing::Values("gloo", "shm", "fake"),
                                          testing::Values(1, 2, 3, 4)),
                         [](const auto& info) {
                           return base::concat(std::get<0>(info.param), "_", std::get<1>(info.param),
                                               "_ranks");
                         });

// Where mpirun has started this process, as mpi_test.cpp has it do for 1 to 4 ranks, it is one of them.
std::vector<std::tuple<const char*, int>> of_processes() {
  const char* const size = std::getenv("OMPI_COMM_WORLD_SIZE");
  if (size == nullptr) return {};
  return {{"mpi", std::atoi(size)}};
}

INSTANTIATE_TEST_SUITE_P(Processes, ConformanceTest, testing::ValuesIn(of_processes()),
                         [](const auto& info) { return base::concat(std::get<0>(info.param), "_ranks"); });

}  // namespace
}  // namespace cohort::comm

#include "cohort/parallel/average.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "cohort/base/error.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort {
namespace {

// Two layers and a norm; every rank's own values unless the seed is one.
struct PartlyUsedNetImpl : torch::nn::Module {
  explicit PartlyUsedNetImpl(std::uint64_t seed, at::ScalarType type = at::kDouble) {
    at::manual_seed(seed);
    first = register_module("first", torch::nn::Linear(5, 7));
    second = register_module("second", torch::nn::Linear(7, 3));
    unused = register_module("unused", torch::nn::Linear(2, 2));
    norm = register_module("norm", torch::nn::BatchNorm1d(7));
    to(type);
  }
  at::Tensor forward(const at::Tensor& x) { return second->forward(at::relu(first->forward(x))); }
  torch::nn::Linear first = nullptr, second = nullptr, unused = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
};
TORCH_MODULE(PartlyUsedNet);

at::Tensor input_of(std::int64_t samples) {
  return at::arange(samples * 5, at::kDouble).view({samples, 5}).sin();
}

void backward(PartlyUsedNet& net, const at::Tensor& input) {
  if (input.size(0) == 0) return;
  net->forward(input).square().mean().backward();
}

// at::manual_seed is the process's: ranks that are threads make their models one after the other.
PartlyUsedNet make_partly_used(std::uint64_t seed) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return PartlyUsedNet(seed);
}

TEST(GradientAveragerTest, SharesOfAnySizeGiveTheGradientOfTheJoinedBatch) {
  const at::Tensor input = input_of(6);
  PartlyUsedNet whole = make_partly_used(1);
  backward(whole, input);
  const std::vector<std::vector<std::int64_t>> shares = {{2, 2, 2}, {3, 2, 1}, {5, 1, 0}, {0, 6, 0}};
  for (const auto& share : shares) {
    for (const std::int64_t chunk_bytes : {std::int64_t{1}, std::int64_t{200}, std::int64_t{1} << 20}) {
      test::run_ranks(3, chunk_bytes == 200 ? "gloo" : "shm", [&](comm::Group& group) {
        PartlyUsedNet net = make_partly_used(1);
        parallel::GradientAverager averager(group, {.chunk_bytes = chunk_bytes});
        const auto rank = static_cast<std::size_t>(group.rank());
        std::int64_t begin = 0;
        for (std::size_t r = 0; r < rank; ++r) begin += share[r];
        backward(net, input.narrow(0, begin, share[rank]));
        const auto report = averager.average(net->parameters(), static_cast<double>(share[rank]));
        EXPECT_TRUE(report.ok());
        EXPECT_EQ(report.weight, 6);
        EXPECT_EQ(report.bytes, (5 * 7 + 7 + 7 * 3 + 3) * 8);
        const auto expected = whole->named_parameters();
        for (const auto& entry : net->named_parameters()) {
          const at::Tensor& want = expected[entry.key()].grad();
          ASSERT_EQ(entry.value().grad().defined(), want.defined()) << entry.key();
          if (!want.defined()) continue;
          EXPECT_LE((entry.value().grad() - want).norm().item<double>(), 1e-13 * want.norm().item<double>())
              << entry.key();
        }
      });
    }
  }
}

TEST(GradientAveragerTest, RepeatedAveragesGiveTheSameBitsOnEveryRankAndOverEitherBackend) {
  std::vector<at::Tensor> results(8);
  for (int round = 0; round < 4; ++round) {
    test::run_ranks(2, round % 2 == 0 ? "gloo" : "shm", [&](comm::Group& group) {
      PartlyUsedNet net = make_partly_used(1);
      parallel::GradientAverager averager(group);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        backward(net, input_of(9).narrow(0, group.rank() * 5, group.rank() == 0 ? 5 : 4));
        averager.average(net->parameters(), group.rank() == 0 ? 5 : 4);
      }
      results[static_cast<std::size_t>(round * 2 + group.rank())] = net->first->weight.grad();
    });
  }
  for (const at::Tensor& result : results) EXPECT_TRUE(at::equal(result, results[0]));
}

TEST(GradientAveragerTest, ALossThatIsNotFiniteOnOneRankIsKnownToAllAndChangesNothing) {
  test::run_ranks(3, "gloo", [](comm::Group& group) {
    PartlyUsedNet net = make_partly_used(1);
    parallel::GradientAverager averager(group);
    backward(net, input_of(4));
    const at::Tensor before = net->first->weight.grad().clone();
    const auto report = averager.average(net->parameters(), group.rank() + 1, group.rank() != 1);
    ASSERT_FALSE(report.ok());
    EXPECT_EQ(report.bad_rank, 1);
    EXPECT_TRUE(at::equal(net->first->weight.grad(), before));
    EXPECT_TRUE(averager.average(net->parameters(), 1).ok());  // the group continues
  });
}

TEST(GradientAveragerTest, ParametersAndBuffersBecomeThoseOfRank0) {
  const PartlyUsedNet expected = make_partly_used(10);
  test::run_ranks(3, "gloo", [&](comm::Group& group) {
    PartlyUsedNet net = make_partly_used(10 + static_cast<std::uint64_t>(group.rank()));
    net->norm->running_mean.fill_(group.rank());
    parallel::GradientAverager averager(group);
    averager.broadcast(*net);
    for (const auto& entry : expected->named_parameters()) {
      EXPECT_TRUE(at::equal(net->named_parameters()[entry.key()], entry.value())) << entry.key();
    }
    EXPECT_TRUE(at::equal(net->norm->running_mean, at::zeros({7}, at::kDouble)));
    net->norm->running_mean.fill_(group.rank() + 1);
    averager.broadcast_buffers(*net);
    EXPECT_TRUE(at::equal(net->norm->running_mean, at::ones({7}, at::kDouble)));
  });
}

TEST(GradientAveragerTest, AnotherModelOnOneRankIsNamed) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const torch::nn::Linear layer(3, group.rank() == 0 ? 4 : 5);
    parallel::GradientAverager averager(group);
    COHORT_EXPECT_THROW_WITH(
        averager.broadcast(*layer), UsageError,
        "the model is not the same on all ranks: rank 0 has 'parameter weight float[4, 3]', "
        "rank 1 has 'parameter weight float[5, 3]'");
  });
}

TEST(GradientAveragerTest, WhatItCannotAverageIsRejected) {
  test::run_ranks(1, "gloo", [](comm::Group& group) {
    parallel::GradientAverager averager(group);
    at::Tensor parameter = at::zeros({3, 2}, at::kFloat).requires_grad_();
    const std::vector<at::Tensor> parameters{parameter};
    for (const double weight : {-1.0, std::nan("")}) {
      COHORT_EXPECT_THROW_WITH(averager.average(parameters, weight), UsageError, "expected 0 or more");
    }
    parameter.mutable_grad() = at::zeros({3, 2}, at::kFloat).to_sparse();
    COHORT_EXPECT_THROW_WITH(averager.average(parameters, 1), UsageError,
                             "gradient 0 [3, 2] is sparse, expected a dense one");
    COHORT_EXPECT_THROW_WITH(parallel::GradientAverager(group, {.chunk_bytes = 0}), UsageError,
                             "chunk_bytes is 0");
    COHORT_EXPECT_THROW_WITH(parallel::GradientAverager(comm::Group()), UsageError, "not in the group");
  });
}

}  // namespace
}  // namespace cohort

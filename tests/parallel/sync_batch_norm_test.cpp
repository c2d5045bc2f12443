#include "cohort/parallel/sync_batch_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>

#include <numeric>

#include "cohort/autograd/recompute.h"
#include "cohort/base/error.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort {
namespace {

namespace nn = torch::nn;
using Shares = std::vector<std::int64_t>;

// Values without pattern whose mean and deviation differ between channels and samples.
at::Tensor values(at::IntArrayRef shape, at::ScalarType type, double seed) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  const at::Tensor x = at::arange(count, at::kDouble);
  const at::Tensor noise = (x * 12.9898 + seed).sin() * 43758.5453;
  return ((noise - noise.floor()) * 2 - 1 + (x * 0.01).cos() * 0.3 + seed * 0.1).view(shape).to(type);
}

// What one training step gives: the result and the gradient of the input, both of the joined batch, the
// gradients of weight and bias summed over ranks, and the running statistics.
struct StepResult {
  at::Tensor output, input_gradient, weight_gradient, bias_gradient, mean, var, batches;
};

template <typename Norm>
StepResult step(Norm& norm, const at::Tensor& input, const at::Tensor& gradient) {
  const at::Tensor x = input.detach().clone(input.suggest_memory_format()).requires_grad_();
  norm->zero_grad();
  const at::Tensor y = norm->forward(x);
  y.backward(gradient);
  EXPECT_EQ(y.suggest_memory_format(), x.suggest_memory_format());
  const auto copy = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.clone() : tensor; };
  StepResult result{y.detach(),
                    x.grad(),
                    {},
                    {},
                    copy(norm->running_mean),
                    copy(norm->running_var),
                    copy(norm->num_batches_tracked)};
  if (norm->weight.defined()) {
    result.weight_gradient = copy(norm->weight.grad());
    result.bias_gradient = copy(norm->bias.grad());
  }
  return result;
}

void expect_close(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  ASSERT_EQ(got.defined(), want.defined()) << what;
  if (!got.defined()) return;
  ASSERT_EQ(got.scalar_type(), want.scalar_type()) << what;
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  if (got.numel() == 0) return;
  const double tolerance = got.scalar_type() == at::kDouble  ? 1e-10
                           : got.scalar_type() == at::kFloat ? 1e-5
                                                             : 2e-2;
  const double scale = std::max(1.0, want.to(at::kDouble).abs().max().item<double>());
  const double error = (got.to(at::kDouble) - want.to(at::kDouble)).abs().max().item<double>();
  EXPECT_LE(error, tolerance * scale) << what;
}

template <typename Module>
void set_affine(Module& norm, at::ScalarType type) {
  norm->to(type);
  if (!norm->weight.defined()) return;
  const at::NoGradGuard no_grad;
  norm->weight.copy_(values({norm->weight.size(0)}, type, 0.5));
  norm->bias.copy_(values({norm->bias.size(0)}, type, 0.25));
}

// Three steps on ranks that have `shares` of the batch, and of one process that has all of it.
template <typename Plain, typename Sync>
void compare(const nn::BatchNormOptions& options, const std::vector<std::int64_t>& shape,
             const Shares& shares, at::ScalarType type,
             at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  constexpr int kSteps = 3;
  std::vector<at::Tensor> inputs, gradients;
  std::vector<StepResult> want;
  Plain plain(options);
  set_affine(plain, type);
  for (int i = 0; i < kSteps; ++i) {
    inputs.push_back(values(shape, type, i + 1.0).contiguous(format));
    gradients.push_back(values(shape, type, -i - 0.3).contiguous(format));
    want.push_back(step(plain, inputs.back(), gradients.back()));
  }
  plain->eval();
  const at::Tensor evaluated = plain->forward(inputs[0]).detach();
  test::run_ranks(static_cast<int>(shares.size()), "gloo", [&](comm::Group& group) {
    Sync norm(options, group);
    set_affine(norm, type);
    EXPECT_EQ(norm->named_parameters().keys(), plain->named_parameters().keys());
    EXPECT_EQ(norm->named_buffers().keys(), plain->named_buffers().keys());
    const auto rank = static_cast<std::ptrdiff_t>(group.rank());
    const std::int64_t begin = std::accumulate(shares.begin(), shares.begin() + rank, std::int64_t{0});
    const std::int64_t count = shares[static_cast<std::size_t>(rank)];
    const auto part = [&](const at::Tensor& whole) { return whole.narrow(0, begin, count); };
    for (int i = 0; i < kSteps; ++i) {
      const auto at = static_cast<std::size_t>(i);
      StepResult got = step(norm, part(inputs[at]), part(gradients[at]));
      expect_close(got.output, part(want[at].output), "output");
      expect_close(got.input_gradient, part(want[at].input_gradient), "gradient of the input");
      for (at::Tensor* sum : {&got.weight_gradient, &got.bias_gradient}) {
        if (sum->defined()) group.all_reduce(*sum).wait();
      }
      expect_close(got.weight_gradient, want[at].weight_gradient, "gradient of the weight");
      expect_close(got.bias_gradient, want[at].bias_gradient, "gradient of the bias");
      expect_close(got.mean, want[at].mean, "running mean");
      expect_close(got.var, want[at].var, "running variance");
      expect_close(got.batches, want[at].batches, "number of batches");
    }
    norm->eval();
    const at::NoGradGuard no_grad;
    if (options.track_running_stats() && count > 0) {
      expect_close(norm->forward(part(inputs[0])), part(evaluated), "evaluation");
    }
  });
}

const std::vector<Shares> kShares{{3, 3}, {5, 1}, {0, 6}, {2, 2, 2}, {1, 0, 5}};

TEST(SyncBatchNormTest, RanksGiveWhatOneProcessGivesOnTheJoinedBatch) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    for (const Shares& shares : kShares) {
      compare<nn::BatchNorm1d, parallel::SyncBatchNorm1d>(5, {6, 5}, shares, type);
      compare<nn::BatchNorm1d, parallel::SyncBatchNorm1d>(5, {6, 5, 4}, shares, type);
      compare<nn::BatchNorm2d, parallel::SyncBatchNorm2d>(5, {6, 5, 4, 3}, shares, type);
      compare<nn::BatchNorm3d, parallel::SyncBatchNorm3d>(5, {6, 5, 2, 4, 3}, shares, type);
    }
  }
}

TEST(SyncBatchNormTest, EachOptionMeansWhatItMeansInBatchNorm) {
  const nn::BatchNormOptions plain(5);
  const std::vector<nn::BatchNormOptions> all{
      nn::BatchNormOptions(5).eps(0.1),
      nn::BatchNormOptions(5).momentum(0.7),
      nn::BatchNormOptions(5).momentum(std::nullopt),
      nn::BatchNormOptions(5).affine(false),
      nn::BatchNormOptions(5).track_running_stats(false),
      nn::BatchNormOptions(5).affine(false).track_running_stats(false)};
  for (const nn::BatchNormOptions& options : all) {
    compare<nn::BatchNorm2d, parallel::SyncBatchNorm2d>(options, {6, 5, 4, 3}, {4, 2}, at::kDouble);
  }
}

TEST(SyncBatchNormTest, KeepsChannelsLast) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    compare<nn::BatchNorm2d, parallel::SyncBatchNorm2d>(8, {6, 8, 4, 3}, {4, 2}, type,
                                                        at::MemoryFormat::ChannelsLast);
  }
  compare<nn::BatchNorm3d, parallel::SyncBatchNorm3d>(8, {6, 8, 4, 3, 2}, {4, 2}, at::kDouble,
                                                      at::MemoryFormat::ChannelsLast3d);
}

TEST(SyncBatchNormTest, NormalizesNarrowTypesInFloat) {
  compare<nn::BatchNorm2d, parallel::SyncBatchNorm2d>(5, {6, 5, 4, 3}, {4, 2}, at::kBFloat16);
  // As under autocast: the values are narrow, parameters and statistics are not.
  const at::Tensor x = values({6, 5, 4, 3}, at::kBFloat16, 1);
  nn::BatchNorm2d plain(5);
  const at::Tensor want = plain->forward(x);
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    parallel::SyncBatchNorm2d norm(5, group);
    const at::Tensor got = norm->forward(x.narrow(0, group.rank() * 3, 3));
    expect_close(got.detach(), want.detach().narrow(0, group.rank() * 3, 3), "output");
    expect_close(norm->running_var, plain->running_var, "running variance");
  });
}

TEST(SyncBatchNormTest, AMeanFarFromZeroCostsNoDigits) {
  const at::Tensor x = values({8, 3}, at::kDouble, 0) + 1e6;
  nn::BatchNorm1d plain(3);
  plain->to(at::kDouble);
  const at::Tensor want = plain->forward(x).detach();
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    parallel::SyncBatchNorm1d norm(3, group);
    norm->to(at::kDouble);
    const at::Tensor got = norm->forward(x.narrow(0, group.rank() * 4, 4)).detach();
    EXPECT_LE((got - want.narrow(0, group.rank() * 4, 4)).abs().max().item<double>(), 1e-8);
    EXPECT_LE((norm->running_var - plain->running_var).abs().max().item<double>(), 1e-8);
  });
}

TEST(SyncBatchNormTest, RunningStatisticsHaveTheSameBitsOnAllRanks) {
  std::vector<at::Tensor> means(3), vars(3);
  test::run_ranks(3, "shm", [&](comm::Group& group) {
    parallel::SyncBatchNorm2d norm(5, group);
    for (int i = 0; i < 4; ++i)
      norm->forward(values({2 + group.rank(), 5, 7, 3}, at::kFloat, i + group.rank()));
    means[static_cast<std::size_t>(group.rank())] = norm->running_mean;
    vars[static_cast<std::size_t>(group.rank())] = norm->running_var;
  });
  for (std::size_t rank = 1; rank < 3; ++rank) {
    EXPECT_TRUE(at::equal(means[rank], means[0]));
    EXPECT_TRUE(at::equal(vars[rank], vars[0]));
  }
}

TEST(SyncBatchNormTest, OneRankIsPlainBatchNorm) {
  const at::Tensor x = values({6, 5, 4, 3}, at::kFloat, 1), gradient = values({6, 5, 4, 3}, at::kFloat, 2);
  nn::BatchNorm2d plain(5);
  const StepResult want = step(plain, x, gradient);
  test::run_ranks(1, "gloo", [&](comm::Group& group) {
    parallel::SyncBatchNorm2d norm(5, group);
    const StepResult got = step(norm, x, gradient);
    EXPECT_TRUE(at::equal(got.output, want.output));
    EXPECT_TRUE(at::equal(got.input_gradient, want.input_gradient));
    EXPECT_TRUE(at::equal(got.var, want.var));
    COHORT_EXPECT_THROW_WITH(norm->forward(x.narrow(0, 0, 1).narrow(2, 0, 1).narrow(3, 0, 1)), UsageError,
                             "got 1 value per channel over 1 rank, expected more than 1 in training");
  });
}

TEST(SyncBatchNormTest, AnInputWithoutGradientNeedsNoMessageInBackward) {
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    parallel::SyncBatchNorm1d norm(4, group);
    norm->forward(values({3, 4}, at::kFloat, group.rank())).square().sum().backward();
    EXPECT_TRUE(norm->weight.grad().defined());
    EXPECT_EQ(group.counters()["all_reduce"].calls, 0);
    const at::Tensor x = values({3, 4}, at::kFloat, group.rank()).requires_grad_();
    norm->forward(x).square().sum().backward();
    EXPECT_EQ(group.counters()["all_reduce"].calls, 1);
  });
}

TEST(SyncBatchNormTest, ClonesShareTheGroupAndNothingElse) {
  test::run_ranks(2, "gloo", [&](comm::Group& group) {
    parallel::SyncBatchNorm1d norm(4, group);
    norm->forward(values({3, 4}, at::kFloat, 1));
    const auto copy = std::dynamic_pointer_cast<parallel::SyncBatchNorm1dImpl>(norm->clone());
    EXPECT_TRUE(at::equal(copy->running_mean, norm->running_mean));
    const at::Tensor before = norm->running_mean.clone();
    copy->forward(values({3, 4}, at::kFloat, 2 + group.rank()));
    EXPECT_TRUE(at::equal(norm->running_mean, before));
    EXPECT_EQ(copy->group().size(), 2);
  });
}

TEST(SyncBatchNormTest, RunsAgainInRecomputation) {
  const at::Tensor x = values({6, 4}, at::kDouble, 1);
  std::vector<at::Tensor> gradients(2);
  for (const bool again : {false, true}) {
    test::run_ranks(2, "gloo", [&](comm::Group& group) {
      parallel::SyncBatchNorm1d norm(4, group);
      norm->to(at::kDouble);
      const at::Tensor part = x.narrow(0, group.rank() * 3, 3).clone().requires_grad_();
      const at::Tensor y = again ? autograd::recompute(norm, part) : norm->forward(part);
      y.pow(3).sum().backward();
      EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 1);
      if (group.rank() == 0) gradients[again ? 1 : 0] = part.grad();
    });
  }
  EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
}

TEST(SyncBatchNormTest, WhatCannotBeNormalizedIsRejectedOnEveryRank) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    parallel::SyncBatchNorm1d norm(4, group);
    for (const std::int64_t samples : {0, 1}) {
      const at::Tensor x = values({group.rank() == 0 ? samples : 0, 4}, at::kFloat, 1);
      COHORT_EXPECT_THROW_WITH(norm->forward(x), UsageError, "value per channel over 2 ranks");
    }
    COHORT_EXPECT_THROW_WITH(norm->forward(values({2, 4, 3, 2}, at::kFloat, 1)), UsageError,
                             "got an input [2, 4, 3, 2], expected 2 or 3 dimensions and 4 channels");
    parallel::SyncBatchNorm2d plane(4, group);
    COHORT_EXPECT_THROW_WITH(plane->forward(values({2, 3, 3, 2}, at::kFloat, 1)), UsageError,
                             "got an input [2, 3, 3, 2], expected 4 dimensions and 4 channels");
    const at::Tensor x = values({3, 4}, at::kFloat, 1).requires_grad_();
    COHORT_EXPECT_THROW_WITH(
        torch::autograd::grad({norm->forward(x).sum()}, {x}, {}, true, /*create_graph=*/true), UsageError,
        "backward with create_graph: the gradient over ranks has no graph");
  });
  COHORT_EXPECT_THROW_WITH(parallel::SyncBatchNorm1d(4, comm::Group()), UsageError, "not in the group");
}

TEST(SyncBatchNormTest, RanksThatDifferAreNamed) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const std::int64_t channels = group.rank() == 0 ? 4 : 5;
    parallel::SyncBatchNorm1d norm(channels, group);
    COHORT_EXPECT_THROW_WITH(norm->forward(values({3, channels}, at::kFloat, 1)), UsageError,
                             "a SyncBatchNorm is not the same on all ranks: rank 0 has '4 channels of Float");
  });
}

}  // namespace
}  // namespace cohort

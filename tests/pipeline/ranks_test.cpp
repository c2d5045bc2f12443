// Stages on the ranks of a group.
#include "tests/support/ranks.h"

#include <map>
#include <mutex>

#include "cohort/core/error.h"
#include "tests/pipeline/nets.h"
#include "tests/support/throws.h"

namespace cohort::pipeline {
namespace {

using namespace test;

struct Result {
  at::Tensor loss;
  Tensors gradients;
};

struct Case {
  Schedule schedule;
  std::vector<std::size_t> cuts;
};

PipelineOptions two(Schedule schedule) {
  PipelineOptions options;
  options.placements = placements(2);
  options.split_size = 3;
  options.schedule = schedule;
  options.timeout = std::chrono::seconds(20);
  return options;
}

TEST(RanksTest, TwoRanksHaveTheBitsOfTwoThreads) {
  const at::Tensor input = torch::randn({11, 10}), target = torch::randn({11, 5});
  const std::vector<Case> cases{{Schedule::kFillDrain, {3}},
                                {Schedule::kOneFOneB, {4}},
                                {Schedule::kInterleaved, {2, 4, 6}},
                                {Schedule::kZeroBubble, {3}}};
  for (const char* backend : {"gloo", "shm"}) {
    for (const Case& each : cases) {
      SCOPED_TRACE(core::concat(backend, ", ", to_string(each.schedule)));
      auto whole = mlp();
      Pipeline threads(cut(whole, each.cuts), two(each.schedule));
      const at::Tensor loss = threads.step(input, target, mse);
      const Tensors expected = take_gradients(whole->parameters());

      std::vector<torch::nn::Sequential> models{mlp(), mlp()};
      cohort::test::run_ranks(2, backend, [&](comm::Group& group) {
        auto stages = cut(models[static_cast<std::size_t>(group.rank())], each.cuts);
        for (std::size_t i = 0; i < stages.size(); ++i) {
          if (static_cast<int>(i) % 2 != group.rank()) stages[i] = Stage::elsewhere();
        }
        PipelineOptions options = two(each.schedule);
        options.group = group;
        Pipeline pipe(stages, options);
        for (int step = 0; step < 3; ++step) {
          zero_grad(models[static_cast<std::size_t>(group.rank())]->parameters());
          EXPECT_TRUE(at::equal(pipe.step(input, target, mse), loss)) << "rank " << group.rank();
        }
      });
      std::size_t found = 0;
      for (const auto& model : models) {
        const Tensors got = take_gradients(model->parameters());
        for (std::size_t i = 0; i < got.size(); ++i) {
          if (!got[i].defined()) continue;
          ++found;
          EXPECT_TRUE(at::equal(got[i], expected[i])) << "gradient " << i;
        }
      }
      EXPECT_EQ(found, expected.size()) << "each parameter on one rank";
    }
  }
}

TEST(RanksTest, WhatDoesNotGoTogetherIsRefused) {
  cohort::test::run_ranks(2, "gloo", [&](comm::Group& group) {
    auto model = mlp();
    PipelineOptions options = two(Schedule::kOneFOneB);
    options.group = group;
    COHORT_EXPECT_THROW_WITH(Pipeline({Stage::elsewhere(), Stage::elsewhere()}, options), UsageError,
                             core::concat("stage ", group.rank(), " is this rank's own"));
    Pipeline pipe(cut(model, {3}), options);
    COHORT_EXPECT_THROW_WITH(pipe.forward(torch::randn({3, 10})), UsageError,
                             "called on a pipeline over ranks");
    options.placements = {"cpu:0"};
    COHORT_EXPECT_THROW_WITH(Pipeline(cut(model, {3}), options), UsageError,
                             "got 1 placements, expected one for each of the 2 ranks");
  });
}

}  // namespace
}  // namespace cohort::pipeline

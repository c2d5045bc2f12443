#include "cohort/parallel/gradient_sync.h"

#include <gtest/gtest.h>

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "cohort/optim/sgd.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort::parallel {
namespace {

// Keeps the largest gradient of all ranks, and counts the steps that it makes.
class LargestSync : public ReplicatedSync {
 public:
  explicit LargestSync(const comm::Group& group) : ReplicatedSync(group) {}
  std::string name() const override { return "largest"; }
  AverageReport average(const optim::Optimizer& optimizer, double samples, bool /*finite*/) override {
    for (const at::Tensor& parameter : optimizer.parameters()) {
      at::Tensor gradient = parameter.grad();
      comm::Group ranks = *group();
      ranks.all_reduce(gradient, c10d::ReduceOp::MAX).wait();
    }
    AverageReport report;
    report.weight = samples;
    return report;
  }
  void step(optim::Optimizer& optimizer, const optim::NonFinite& found) override {
    ++steps;
    optimizer.step_unless(found);
  }
  int steps = 0;
};

COHORT_REGISTER_GRADIENT_SYNC("largest", {.make =
                                              [](const comm::Group& group, const ReducerOptions&) {
                                                return std::make_shared<LargestSync>(group);
                                              },
                                          .copies_gradients = true});

TEST(GradientSyncTest, ARegisteredSyncReducesGradientsAndMakesTheStep) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    at::Tensor weight = at::zeros({2}).set_requires_grad(true);
    weight.mutable_grad() = at::full({2}, group.rank() + 1.0f);
    optim::SGD optimizer({weight}, optim::SGDOptions().lr(1));
    const auto sync = make_gradient_sync("largest", group);
    EXPECT_TRUE(sync->average(optimizer, 1, true).ok());
    sync->step(optimizer, {});
    EXPECT_TRUE(at::equal(weight.detach(), at::full({2}, -2.0f)));
    EXPECT_EQ(dynamic_cast<LargestSync&>(*sync).steps, 1);
  });
  EXPECT_TRUE(gradient_sync_type("largest").copies_gradients);
  EXPECT_FALSE(gradient_sync_type("ddp").copies_gradients);
}

// Two parameters with an optimizer each, and this rank's gradients of them.
TaskParts two_optimizers() {
  TaskParts parts;
  for (const char* name : {"first", "second"}) {
    const at::Tensor parameter = at::zeros({2}).set_requires_grad(true);
    parts.optimizers.push_back(
        {name, std::make_shared<optim::SGD>(std::vector<at::Tensor>{parameter}, optim::SGDOptions().lr(1)),
         nullptr});
  }
  return parts;
}

TEST(GradientSyncTest, EachOptimizerHasACommunicationHookOfItsOwn) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    std::vector<std::shared_ptr<int>> steps;  // of each hook: the buckets that it was given
    const auto make_hook = [&steps] {
      steps.push_back(std::make_shared<int>(0));
      return CommHook([count = steps.back()](const HookBucket& bucket) {
        ++*count;
        return all_reduce(bucket.group, bucket.bucket.getBuffer(), bucket.timeout);
      });
    };
    const auto sync = make_gradient_sync("ddp", group, {.make_hook = make_hook});
    const TaskParts parts = two_optimizers();
    sync->begin(parts);
    for (int step = 0; step < 3; ++step) {
      for (const NamedOptimizer& entry : parts.optimizers) {
        at::Tensor parameter = entry.optimizer->parameters().front();
        parameter.mutable_grad() = at::full({2}, group.rank() + 1.0f);
        EXPECT_TRUE(sync->average(*entry.optimizer, 1, true).ok());
        EXPECT_TRUE(at::equal(parameter.grad(), at::full({2}, 1.5f)));
      }
    }
    ASSERT_EQ(steps.size(), 2U);
    EXPECT_EQ(*steps[0], 3);
    EXPECT_EQ(*steps[1], 3);
  });
}

TEST(GradientSyncTest, OneHookForSeveralOptimizersIsRejected) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const auto sync = make_gradient_sync("ddp", group, {.hook = all_reduce_hook()});
    COHORT_EXPECT_THROW_WITH(sync->begin(two_optimizers()), UsageError,
                             "a communication hook is for one Reducer, got 2 optimizers");
    const auto both =
        make_gradient_sync("ddp", group, {.hook = all_reduce_hook(), .make_hook = all_reduce_hook});
    TaskParts one_optimizer = two_optimizers();
    one_optimizer.optimizers.pop_back();
    COHORT_EXPECT_THROW_WITH(both->begin(one_optimizer), UsageError, "both hook and make_hook");
  });
}

TEST(GradientSyncTest, AutoStandsForNoneOnOneRankAndForTheRunnersSyncOnSeveral) {
  EXPECT_EQ(resolve_gradients("auto", 1), "none");
  EXPECT_EQ(resolve_gradients("auto", 1, "average"), "none");
  EXPECT_EQ(resolve_gradients("auto", 2), "ddp");
  EXPECT_EQ(resolve_gradients("auto", 3, "average"), "average");
  for (const char* name : {"none", "average", "ddp", "largest"}) {
    EXPECT_EQ(resolve_gradients(name, 1, "ddp"), name);
    EXPECT_EQ(resolve_gradients(name, 4, "average"), name);
  }
  test::run_ranks(2, "gloo",
                  [](comm::Group& group) { EXPECT_EQ(make_gradient_sync("auto", group)->name(), "ddp"); });
}

TEST(GradientSyncTest, OneThatSupportsVirtualRanksMakesTheSyncOfThem) {
  for (const char* name : {"auto", "average", "ddp"}) {
    EXPECT_EQ(make_virtual_rank_sync(name, {}, {.num_virtual_ranks = 3})->num_virtual_ranks(), 3) << name;
  }
  for (const char* name : {"none", "largest"}) {
    COHORT_EXPECT_THROW_WITH(make_virtual_rank_sync(name, {}, {}), UsageError,
                             std::string("the gradient sync '") + name + "' does not support virtual ranks");
  }
}

TEST(GradientSyncTest, UnknownNamesAndMissingGroupsAreErrors) {
  COHORT_EXPECT_THROW_WITH(make_gradient_sync("averag"), UsageError,
                           "there is no gradient sync 'averag'. Try: average; the gradient syncs are auto, "
                           "average, ddp, largest, none");
  for (const char* name : {"average", "ddp", "largest"}) {
    COHORT_EXPECT_THROW_WITH(make_gradient_sync(name), UsageError,
                             std::string("the gradient sync '") + name + "' needs a process group");
  }
  EXPECT_EQ(make_gradient_sync("auto")->name(), "none");
  COHORT_EXPECT_THROW_WITH(
      register_gradient_sync("ddp", {.make = [](const auto&, const auto&) { return nullptr; }}), UsageError,
      "'ddp' is registered already, by Cohort");
}

}  // namespace
}  // namespace cohort::parallel

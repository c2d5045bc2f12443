#include "cohort/parallel/gradient_sync.h"

#include <gtest/gtest.h>

#include "cohort/optim/sgd.h"
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

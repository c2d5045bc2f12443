#include "cohort/train/internal/fit/fit_ranks.h"

#include <gtest/gtest.h>

#include <memory>

#include "tests/support/ranks.h"

namespace cohort::train {
namespace {

struct IdleTask : Task {
  StepMetrics train_step(data::Batch&) override { return {}; }
  using Task::gradient_sync;
};

TEST(FitRanksTest, OptionsWithoutAGradientSyncAreOneProcess) {
  const TrainerOptions options;
  const FitRanks ranks(options);
  EXPECT_EQ(ranks.gradient_sync().name(), "none");
  EXPECT_EQ(ranks.coordinator().size(), 1);
  EXPECT_TRUE(ranks.coordinator().is_first());
}

TEST(FitRanksTest, ATaskThatJoinedIsAloneAgainAfterwards) {
  test::run_ranks(2, "gloo", [](comm::Group& group) {
    const auto sync = parallel::make_gradient_sync("average", group);
    const TrainerOptions options = TrainerOptions().gradient_sync(sync);
    IdleTask task, other;
    other.set_gradient_sync(sync);
    {
      FitRanks ranks(options);
      EXPECT_EQ(&ranks.gradient_sync(), sync.get());
      EXPECT_EQ(ranks.coordinator().size(), 2);
      EXPECT_EQ(ranks.coordinator().rank(), group.rank());
      EXPECT_EQ(task.gradient_sync().size(), 1) << "it did not join yet";
      ranks.join(task);
      EXPECT_EQ(&task.gradient_sync(), sync.get());
    }
    EXPECT_EQ(task.gradient_sync().size(), 1);
    const FitRanks evaluation(options);  // no task joins
    EXPECT_EQ(&other.gradient_sync(), sync.get());
  });
}

}  // namespace
}  // namespace cohort::train

#include "cohort/train/internal/fit/fit_progress.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>

#include "cohort/data/tensor_dataset.h"
#include "cohort/train/internal/fit/group_coordinator.h"

namespace cohort::train {
namespace {

using Averages = std::map<std::string, double>;

/// Three epochs of five steps, of two samples each.
class FitProgressTest : public testing::Test {
 protected:
  void make_step(double loss) {
    ASSERT_TRUE(loader.next());
    progress.step_made(loader.state());
    progress.add({{"loss", loss, 2}});
  }

  TrainerOptions options = TrainerOptions().epochs(3);
  const GroupCoordinator ranks{nullptr};
  FitProgress progress{options, ranks};
  data::Loader loader{std::make_shared<data::TensorDataset>(std::vector<at::Tensor>{at::ones({10, 1})}),
                      {.batch_size = 2}};
};

TEST_F(FitProgressTest, AnEpochBeginsAtItsFirstSampleWithoutAverages) {
  progress.begin_epoch(loader);
  make_step(3);
  make_step(1);
  EXPECT_EQ(progress.steps_made(), 2);
  EXPECT_EQ(progress.state.loader.samples_consumed, 4);
  EXPECT_EQ(progress.averages(), (Averages{{"loss", 2}}));
  progress.state.epoch_seconds = progress.state.wait_seconds = 1;
  progress.complete_epoch();
  progress.begin_epoch(loader);
  EXPECT_EQ(progress.state.epoch, 1);
  EXPECT_EQ(progress.state.step, 2);
  EXPECT_EQ(progress.state.loader, (data::LoaderState{.epoch = 1}));
  EXPECT_EQ(progress.state.epoch_seconds + progress.state.wait_seconds, 0);
  EXPECT_EQ(loader.state().epoch, 1);
  EXPECT_EQ(loader.state().samples_consumed, 0);
  EXPECT_EQ(progress.averages(), Averages());
}

TEST_F(FitProgressTest, AResumedEpochContinuesInItsMiddleAndTheNextOneBeginsAnew) {
  RunState saved;
  saved.epoch = 1;
  saved.step = 7;
  saved.loader = {.epoch = 1, .samples_consumed = 4};
  saved.meters = {{"loss", {.weighted = 8, .weight = 4}}};
  saved.epoch_seconds = 5;
  progress.continue_from(saved);
  progress.begin_epoch(loader);
  EXPECT_EQ(loader.state().epoch, 1);
  EXPECT_EQ(loader.state().samples_consumed, 4);
  EXPECT_EQ(progress.state.epoch_seconds, 5);
  make_step(5);
  EXPECT_EQ(progress.state.step, 8);
  EXPECT_EQ(progress.steps_made(), 1) << "of this call of fit()";
  EXPECT_EQ(progress.state.loader.samples_consumed, 6);
  EXPECT_EQ(progress.averages(), (Averages{{"loss", 3}}));
  progress.complete_epoch();
  progress.begin_epoch(loader);
  EXPECT_EQ(loader.state().epoch, 2);
  EXPECT_EQ(loader.state().samples_consumed, 0) << "only the first epoch continues";
  EXPECT_EQ(progress.averages(), Averages());
}

TEST_F(FitProgressTest, MetersOfTheStateAreFilledWhenAsked) {
  progress.begin_epoch(loader);
  make_step(3);
  EXPECT_TRUE(progress.state.meters.empty());
  progress.total_meters();
  EXPECT_EQ(progress.state.meters.at("loss").weighted, 6);
  EXPECT_EQ(progress.state.meters.at("loss").weight, 2);
  EXPECT_EQ(progress.averages(), (Averages{{"loss", 3}})) << "and the epoch continues";
}

TEST_F(FitProgressTest, ARunIsOverAfterItsEpochsOrWhenTheEpochAtItsStepLimitWasReported) {
  EXPECT_FALSE(progress.is_over());
  progress.state.epoch = 3;
  EXPECT_TRUE(progress.is_over());
  progress.state.epoch = 1;
  options.max_steps(7);
  progress.state.step = 6;
  EXPECT_FALSE(progress.step_limit_reached());
  progress.state.step = 7;
  EXPECT_TRUE(progress.step_limit_reached());
  EXPECT_FALSE(progress.is_over()) << "a signal may have come before the report";
  progress.state.reported_step = 7;
  EXPECT_TRUE(progress.is_over());
}

TEST_F(FitProgressTest, StepsThatAreLeftAreThoseOfTheEpochsOrUpToTheLimit) {
  EXPECT_EQ(progress.steps_left(5), 15);
  progress.state.step = 4;
  EXPECT_EQ(progress.steps_left(5), 11);
  options.max_steps(7);
  EXPECT_EQ(progress.steps_left(5), 3);
  options.max_steps(2);
  EXPECT_EQ(progress.steps_left(5), 0);
  options.max_steps(20);
  EXPECT_EQ(progress.steps_left(5), 11);
  options.epochs(std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(progress.steps_left(4), 16);
}

}  // namespace
}  // namespace cohort::train

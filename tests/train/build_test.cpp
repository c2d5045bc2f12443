// How the configuration's keys reach model, optimizer and schedule.
#include "cohort/train/build.h"

#include <gtest/gtest.h>

#include "cohort/optim/adam.h"

namespace cohort::train {
namespace {

TEST(BuildTest, TheDefaultLearningRateOfAdamIsThatOfTheOptimizers) {
  EXPECT_EQ(default_lr("adam"), optim::AdamOptions().lr());
  EXPECT_EQ(default_lr("adamw"), optim::AdamWOptions().lr());
}

}  // namespace
}  // namespace cohort::train

#include "cohort/train/internal/fit/save_policy.h"

#include <gtest/gtest.h>

namespace cohort::train {
namespace {

TEST(SavePolicyTest, StepsAreSavedAtTheirTurnAndTheLastOfAnEpochAfterItsEvaluation) {
  const TrainerOptions options = TrainerOptions().epochs(9).save_every(4).save_every_steps(3);
  SavePolicy policy(options);
  EXPECT_EQ(policy.saved_step(), -1);
  EXPECT_FALSE(policy.is_due_after_step(2, false));
  EXPECT_TRUE(policy.is_due_after_step(3, false));
  EXPECT_FALSE(policy.is_due_after_epoch(2));
  EXPECT_FALSE(policy.is_due_after_step(6, true));
  EXPECT_TRUE(policy.is_due_after_epoch(2));
  policy.epoch_ended();
  EXPECT_FALSE(policy.is_due_after_epoch(3));
  for (const std::int64_t epoch : {1, 4, 8, 9}) EXPECT_TRUE(policy.is_due_after_epoch(epoch)) << epoch;
  policy.saved(6);
  EXPECT_EQ(policy.saved_step(), 6);
}

TEST(SavePolicyTest, ARequestHoldsUntilTheNextSave) {
  const TrainerOptions options = TrainerOptions().save_every(0);
  SavePolicy policy(options);
  policy.begin();
  EXPECT_FALSE(policy.is_due_by_clock());
  policy.request();
  EXPECT_TRUE(policy.is_due_after_step(1, false));
  EXPECT_TRUE(policy.is_due_after_step(2, false));
  EXPECT_EQ(policy.num_saves(), 0);
  policy.saving();
  EXPECT_EQ(policy.num_saves(), 1);
  EXPECT_FALSE(policy.is_due_after_step(3, false));
  EXPECT_FALSE(policy.is_due_after_epoch(1));
}

TEST(SavePolicyTest, TheClockCountsFromTheLastSave) {
  const TrainerOptions options = TrainerOptions().save_every_minutes(1e-9);
  SavePolicy policy(options);
  EXPECT_TRUE(policy.is_due_by_clock());  // it was never begun
}

TEST(SavePolicyTest, TheClockContinuesFromThatOfAnotherProcess) {
  const TrainerOptions options = TrainerOptions().save_every_minutes(60);
  SavePolicy policy(options);
  EXPECT_EQ(policy.seconds_since_save(), 0);
  policy.set_seconds_since_save(3500);
  policy.begin();
  EXPECT_GE(policy.seconds_since_save(), 3500);
  EXPECT_FALSE(policy.is_due_by_clock());
  policy.set_seconds_since_save(3601);
  EXPECT_TRUE(policy.is_due_by_clock());
  policy.saving();
  EXPECT_FALSE(policy.is_due_by_clock());
}

}  // namespace
}  // namespace cohort::train

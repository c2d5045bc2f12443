#include "cohort/optim/schedule_factory.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/throws.h"

namespace cohort::optim {
namespace {

COHORT_REGISTER_SCHEDULE("square_root", [](const ScheduleOptions& options) {
  const double every = options.extra.number("every", 1);
  return lambda([every](std::int64_t step) { return 1 / std::sqrt(1.0 + static_cast<double>(step) / every); },
                "square_root");
});

TEST(ScheduleFactoryTest, EachNameIsTheScheduleOfThatName) {
  const ScheduleOptions options{.total_steps = 100,
                                .unit_steps = 10,
                                .lr = 0.5,
                                .milestones = {2, 5},
                                .step_size = 3,
                                .gamma = 0.1,
                                .eta_min = 0.1};
  const std::map<std::string, LRSchedulePtr> expected = {{"constant", constant()},
                                                         {"step", multistep({30, 60, 90}, 0.1)},
                                                         {"multistep", multistep({20, 50}, 0.1)},
                                                         {"cosine", per_epoch(cosine(10, 0.1), 10)},
                                                         {"linear", per_epoch(linear(1.0, 0.2, 10), 10)},
                                                         {"one_cycle", one_cycle({.total_steps = 100})}};
  for (const auto& [name, schedule] : expected) {
    ScheduleOptions of = options;
    of.name = name;
    const LRSchedulePtr made = make_schedule(of);
    for (std::int64_t step = 0; step < 100; ++step) {
      EXPECT_DOUBLE_EQ(made->lr(step, 0.5), schedule->lr(step, 0.5)) << name << " " << step;
    }
  }
}

TEST(ScheduleFactoryTest, TheWarmUpRunsBeforeAndMilestonesCountFromTheStartOfTheRun) {
  const LRSchedulePtr schedule = make_schedule({.name = "multistep",
                                                .total_steps = 100,
                                                .warmup_steps = 4,
                                                .warmup_start = 0.5,
                                                .milestones = {10},
                                                .gamma = 0.1});
  EXPECT_DOUBLE_EQ(schedule->lr(0, 1), 0.5);
  EXPECT_DOUBLE_EQ(schedule->lr(9, 1), 1);
  EXPECT_DOUBLE_EQ(schedule->lr(10, 1), 0.1);
}

TEST(ScheduleFactoryTest, ARegisteredScheduleIsMadeByNameWithItsOptions) {
  const LRSchedulePtr schedule =
      make_schedule({.name = "square_root", .total_steps = 9, .extra = {{"every", "4"}}});
  EXPECT_DOUBLE_EQ(schedule->lr(12, 1), 0.5);
  COHORT_EXPECT_THROW_WITH(make_schedule({.name = "square_root", .extra = {{"evry", "4"}}}), ConfigError,
                           "evry");
}

TEST(ScheduleFactoryTest, WhatCannotBeAScheduleIsAnError) {
  COHORT_EXPECT_THROW_WITH(make_schedule({.name = "cosin"}), UsageError,
                           "there is no schedule 'cosin'. Try: cosine; ");
  COHORT_EXPECT_THROW_WITH(make_schedule({.name = "cosine", .extra = {{"a", "b"}}}), ConfigError, "a");
  COHORT_EXPECT_THROW_WITH(make_schedule({.total_steps = 0}), UsageError, "got 0 steps");
  COHORT_EXPECT_THROW_WITH(make_schedule({.name = "step", .step_size = 0}), UsageError, "step_size is 0");
  COHORT_EXPECT_THROW_WITH(make_schedule({.name = "one_cycle", .total_steps = 9, .warmup_steps = 2}),
                           UsageError, "one_cycle has a warm-up of its own");
}

}  // namespace
}  // namespace cohort::optim

// Schedules that a configuration asks for.
#include <gtest/gtest.h>

#include "cohort/train/internal/factories.h"

namespace cohort::train {
namespace {

TEST(ScheduleConfigTest, StepsThatNoRunReachesChangeNothing) {
  for (const char* name : {"step", "multistep"}) {
    for (const std::int64_t number :
         {std::int64_t{1} << 52, std::int64_t{1} << 53, (std::int64_t{1} << 53) - 1}) {
      config::ScheduleConfig config;
      config.name = name;
      config.step_size = number;
      config.milestones = {number};
      // Two to the power of 11, 12 and 13 steps: the product is 0, or less than 0, in 64 bits.
      for (const std::int64_t steps : {2048, 4096, 8192}) {
        const auto schedule = make_schedule(config, {}, 0.1, steps);
        for (const std::int64_t step : {std::int64_t{0}, std::int64_t{100}, 89 * steps}) {
          EXPECT_EQ(schedule->lr(step, 0.5), 0.5) << name << " " << number << " " << steps;
        }
      }
    }
  }
}

}  // namespace
}  // namespace cohort::train

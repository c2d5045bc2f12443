#include "cohort/optim/schedule.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cohort/base/error.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/sgd.h"
#include "tests/optim/support.h"
#include "tests/support/throws.h"

namespace cohort::optim {
namespace {

std::map<std::string, LRSchedulePtr> golden_schedules() {
  OneCycleOptions cycle{.total_steps = 1000, .max_lr = 0.5};
  OneCycleOptions straight = cycle;
  straight.linear_anneal = true;
  straight.pct_start = 0.137;
  straight.div_factor = 10;
  straight.final_div_factor = 100;
  straight.base_momentum = 0.8;
  straight.max_momentum = 0.9;
  OneCycleOptions three = cycle;
  three.three_phase = true;
  three.pct_start = 0.4;
  OneCycleOptions three_straight = three;
  three_straight.linear_anneal = true;
  three_straight.pct_start = 0.25;
  three_straight.cycle_momentum = false;
  OneCycleOptions falling = cycle;
  falling.pct_start = 0;
  return {
      {"constant", constant()},
      {"constant_factor", constant(0.25, 40)},
      {"step", step_decay(30, 0.7)},
      {"multistep", multistep({100, 300, 300, 800}, 0.3)},
      {"cosine", cosine(1000, 0.001)},
      {"cosine_periodic", cosine(150)},
      {"linear", linear(0.01, 1.0, 500)},
      {"linear_down", linear(1.0, 0.0, 700)},
      {"exponential", exponential(0.995)},
      {"polynomial", polynomial(900, 2.0)},
      {"polynomial_half", polynomial(1000, 0.5)},
      {"warmup_cosine", warmup(50, 0.01, cosine(950, 1e-5))},
      {"three_parts", sequential({linear(0.1, 1.0, 20), step_decay(100, 0.5), exponential(0.99)}, {20, 400})},
      {"one_cycle", one_cycle(cycle)},
      {"one_cycle_linear", one_cycle(straight)},
      {"one_cycle_three", one_cycle(three)},
      {"one_cycle_three_linear", one_cycle(three_straight)},
      {"one_cycle_falling", one_cycle(falling)},
  };
}

at::Tensor parameter() {
  return at::zeros({2}).set_requires_grad(true);
}

/// The values of one line of schedules.txt, one for each step; VALUE*COUNT stands for COUNT of them.
std::vector<double> golden_values(const std::vector<std::string>& words) {
  std::vector<double> values;
  for (std::size_t k = 1; k < words.size(); ++k) {
    const std::size_t star = words[k].find('*');
    const std::size_t count = star == std::string::npos ? 1 : std::stoul(words[k].substr(star + 1));
    values.insert(values.end(), count, std::stod(words[k].substr(0, star)));
  }
  return values;
}

TEST(ScheduleTest, EqualsPythonsChainAtEachOfAThousandStepsToOneInTenToTheTwelfth) {
  const auto golden = test::read_golden("schedules.txt");
  const auto schedules = golden_schedules();
  ASSERT_EQ(golden.size(), schedules.size());
  for (const auto& [name, lines] : golden) {
    const LRSchedule& schedule = *schedules.at(name);
    ASSERT_EQ(lines.at(0).at(0), "lr") << name;
    const std::vector<double> rates = golden_values(lines[0]);
    ASSERT_EQ(rates.size(), 1000U) << name;
    std::vector<double> momenta;
    if (lines.size() > 1) {
      ASSERT_EQ(lines[1].at(0), "momentum") << name;
      momenta = golden_values(lines[1]);
      ASSERT_EQ(momenta.size(), rates.size()) << name;
    }
    for (std::size_t i = 0; i < rates.size(); ++i) {
      const auto step = static_cast<std::int64_t>(i);
      EXPECT_NEAR(schedule.lr(step, 0.1), rates[i], 1e-13) << name << " at step " << step;
      const auto ours = schedule.momentum(step);
      ASSERT_EQ(ours.has_value(), !momenta.empty()) << name << " at step " << step;
      if (ours) {
        EXPECT_NEAR(*ours, momenta[i], 1e-12) << name << " at step " << step;
      }
    }
  }
}

TEST(ScheduleTest, ApplyScalesEachGroupFromItsOwnInitialRate) {
  SGD sgd({{.params = {parameter()}, .lr = 1.0}, {.params = {parameter()}}}, SGDOptions(0.1));
  const LRSchedulePtr schedule = step_decay(10, 0.5);
  schedule->apply(sgd, 25);
  schedule->apply(sgd, 25);  // no state: twice is the same as once
  EXPECT_DOUBLE_EQ(sgd.param_groups()[0].lr, 0.25);
  EXPECT_DOUBLE_EQ(sgd.param_groups()[1].lr, 0.025);
  schedule->apply(sgd, 0);
  EXPECT_DOUBLE_EQ(sgd.param_groups()[1].lr, 0.1);
}

TEST(ScheduleTest, OneCycleTakesEachGroupsRateAsItsPeakAndCyclesMomentum) {
  SGD sgd({{.params = {parameter()}, .lr = 1.0}, {.params = {parameter()}}}, SGDOptions(0.1).momentum(0.9));
  Adam adam({parameter()});
  const LRSchedulePtr schedule = one_cycle({.total_steps = 100});
  schedule->apply(sgd, 29);
  schedule->apply(adam, 29);
  EXPECT_DOUBLE_EQ(sgd.param_groups()[0].lr, 1.0);
  EXPECT_DOUBLE_EQ(sgd.param_groups()[1].lr, 0.1);
  EXPECT_DOUBLE_EQ(sgd.param_groups()[0].momentum, 0.85);
  EXPECT_DOUBLE_EQ(adam.param_groups()[0].beta1, 0.85);
}

TEST(ScheduleTest, PerEpochChangesBetweenEpochsOnly) {
  const LRSchedulePtr schedule = per_epoch(multistep({2}), 10);
  EXPECT_DOUBLE_EQ(schedule->lr(19, 1.0), 1.0);
  EXPECT_DOUBLE_EQ(schedule->lr(20, 1.0), 0.1);
}

TEST(ScheduleTest, DescribesItself) {
  EXPECT_EQ(constant()->describe(), "constant");
  EXPECT_EQ(warmup(5, 0.1, multistep({30, 60}))->describe(),
            "sequential(linear(start_factor=0.1, end_factor=1, total_iters=5), from 5: "
            "multistep(milestones=[30, 60], gamma=0.1))");
  EXPECT_EQ(per_epoch(cosine(90), 7)->describe(), "cosine(t_max=90, eta_min=0) every 7 steps");
  EXPECT_EQ(one_cycle({.total_steps = 50})->describe(),
            "one_cycle(total_steps=50, max_lr=initial, pct_start=0.3, anneal=cos)");
}

TEST(ScheduleTest, RejectsArgumentsOutOfRange) {
  COHORT_EXPECT_THROW_WITH(step_decay(0), UsageError, "step_size is 0, expected 1 or more");
  COHORT_EXPECT_THROW_WITH(cosine(-1), UsageError, "t_max is -1, expected 1 or more");
  COHORT_EXPECT_THROW_WITH(linear(0.0), UsageError, "start_factor is 0, expected above 0");
  COHORT_EXPECT_THROW_WITH(linear(0.5, 2.0), UsageError, "end_factor is 2, expected 0 to 1");
  COHORT_EXPECT_THROW_WITH(constant(2.0), UsageError, "factor is 2, expected 0 to 1");
  COHORT_EXPECT_THROW_WITH(constant(1.0, -1), UsageError, "total_iters is -1");
  COHORT_EXPECT_THROW_WITH(exponential(0.0), UsageError, "gamma is 0, expected above 0");
  COHORT_EXPECT_THROW_WITH(polynomial(0), UsageError, "total_iters is 0");
  COHORT_EXPECT_THROW_WITH(polynomial(5, -1), UsageError, "power is -1");
  COHORT_EXPECT_THROW_WITH(multistep({-5}), UsageError, "milestone -5, expected 0 or more");
  COHORT_EXPECT_THROW_WITH(lambda(nullptr, "x"), UsageError, "the function is empty");
  COHORT_EXPECT_THROW_WITH(sequential({constant()}, {5}), UsageError, "got 1 schedules and 1 milestones");
  COHORT_EXPECT_THROW_WITH(sequential({constant(), constant(), constant()}, {5, 3}), UsageError,
                           "milestones must rise");
  COHORT_EXPECT_THROW_WITH(sequential({nullptr}, {}), UsageError, "a schedule is null");
  COHORT_EXPECT_THROW_WITH(per_epoch(nullptr, 5), UsageError, "the schedule is null");
  COHORT_EXPECT_THROW_WITH(per_epoch(constant(), 0), UsageError, "steps_per_epoch is 0");
  COHORT_EXPECT_THROW_WITH(constant()->lr(-1, 0.1), UsageError, "got step -1, expected 0 or more");
}

TEST(ScheduleTest, ARateThatIsNotFiniteIsNotApplied) {
  SGD sgd({parameter()}, SGDOptions(0.1));
  const LRSchedulePtr endless =
      lambda([](std::int64_t) { return std::numeric_limits<double>::infinity(); }, "endless");
  COHORT_EXPECT_THROW_WITH(endless->apply(sgd, 3), UsageError,
                           "endless gives a rate of inf at step 3 for a group that began with 0.1");
  EXPECT_DOUBLE_EQ(sgd.param_groups()[0].lr, 0.1);
}

TEST(ScheduleTest, OneCycleRejectsWhatCannotWork) {
  COHORT_EXPECT_THROW_WITH(one_cycle({}), UsageError, "total_steps is 0");
  COHORT_EXPECT_THROW_WITH(one_cycle({.total_steps = 9, .pct_start = 2}), UsageError, "pct_start is 2");
  COHORT_EXPECT_THROW_WITH(one_cycle({.total_steps = 9, .div_factor = 0}), UsageError, "div_factor is 0");
  COHORT_EXPECT_THROW_WITH(one_cycle({.total_steps = 9, .final_div_factor = 0}), UsageError,
                           "final_div_factor is 0");
  COHORT_EXPECT_THROW_WITH(one_cycle({.total_steps = 10, .pct_start = 0.1}), UsageError, "is one step");
  COHORT_EXPECT_THROW_WITH(one_cycle({.total_steps = 10, .pct_start = 1.0}), UsageError, "leaves no steps");
  const LRSchedulePtr schedule = one_cycle({.total_steps = 10});
  COHORT_EXPECT_THROW_WITH(schedule->lr(11, 0.1), UsageError, "got step 11, expected 0 to 10");
}

}  // namespace
}  // namespace cohort::optim

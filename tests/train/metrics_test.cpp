#include "cohort/train/metrics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "cohort/optim/finite.h"
#include "cohort/train/internal/fit/state_numbers.h"
#include "cohort/train/internal/fit/step_check.h"

namespace cohort::train {
namespace {

/// The losses of many virtual ranks, whose sum in double depends on their order.
std::vector<StepMetrics> draw_losses(std::mt19937_64& random) {
  std::uniform_real_distribution<double> mantissa(0.5, 1);
  std::vector<StepMetrics> steps;
  for (int step = 0; step < 60; ++step) {
    const double loss = std::ldexp(mantissa(random), static_cast<int>(random() % 40) - 20);
    steps.push_back({{"loss", loss, static_cast<double>(1 + random() % 7)}});
  }
  return steps;
}

TEST(MeterSetTest, MeansDoNotDependOnTheOrderNorOnHowStepsAreDivided) {
  std::mt19937_64 random(9);
  int differs_in_double = 0;
  for (int round = 0; round < 50; ++round) {
    std::vector<StepMetrics> steps = draw_losses(random);
    MeterSet expected;
    double in_order = 0, shuffled = 0;
    for (const StepMetrics& step : steps) {
      expected.add(step);
      in_order += step[0].value * step[0].weight;
    }
    std::ranges::shuffle(steps, random);
    // Two ranks, one of which is saved and resumes on its way.
    MeterSet first, second;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      shuffled += steps[i][0].value * steps[i][0].weight;
      (i % 3 == 0 ? second : first).add(steps[i]);
      if (i != 30) continue;
      const auto written = sum_to_json(first.sums().at("loss")).dump();
      first.restore({{"loss", sum_from_json(nlohmann::json::parse(written))}});
    }
    ExactSum total = first.sums().at("loss").exact();
    total.add(second.sums().at("loss").exact());
    MeterSet joined;
    joined.restore({{"loss", MeterSet::Sum::of(
                                 total, first.sums().at("loss").weight + second.sums().at("loss").weight)}});
    EXPECT_EQ(joined.averages(), expected.averages());
    EXPECT_EQ(joined.sums().at("loss").rest, expected.sums().at("loss").rest);
    if (in_order != shuffled) ++differs_in_double;
  }
  EXPECT_GT(differs_in_double, 20) << "these numbers would not show a sum that rounds";
}

TEST(MeterSetTest, SumsOfOlderVersionsAreTwoNumbers) {
  const MeterSet::Sum sum = sum_from_json(nlohmann::json::parse("[0.5, 4]"));
  EXPECT_EQ(sum.exact().value(), 0.5);
  EXPECT_EQ(sum.weight, 4);
  EXPECT_TRUE(sum.rest.empty());
}

TEST(StepCheckTest, OneOfSeveralLossesThatIsNotFiniteCounts) {
  StepCheck check;
  const auto is_finite = [&](double first, double second) {
    return check.add(1, {{"loss", first, 1}, {"loss", second, 1}}, optim::NonFinite()).at(0).is_finite();
  };
  EXPECT_TRUE(is_finite(1, 2));
  EXPECT_FALSE(is_finite(std::nan(""), 2));
  EXPECT_FALSE(is_finite(1, std::nan("")));
}

}  // namespace
}  // namespace cohort::train

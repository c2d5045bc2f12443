#include "cohort/train/internal/fit/throughput.h"

#include <gtest/gtest.h>

namespace cohort::train {
namespace {

TEST(ThroughputTest, RatesAreOfTheStepsSinceTheLastReport) {
  Throughput throughput;
  throughput.add_wait(0.5);
  throughput.add_samples(30);
  throughput.add_step(2);
  throughput.add_samples(10);
  throughput.add_step(2);
  StepReport report;
  throughput.fill(report, 5);
  EXPECT_DOUBLE_EQ(report.samples_per_second, 10);
  EXPECT_DOUBLE_EQ(report.data_wait_share, 0.125);
  EXPECT_DOUBLE_EQ(report.seconds_left, 10);
  throughput.set_wait(1);  // the mean over ranks
  throughput.fill(report, 0);
  EXPECT_DOUBLE_EQ(report.data_wait_share, 0.25);
  throughput.reset();
  throughput.add_samples(3);
  throughput.add_step(1);
  throughput.fill(report, 1);
  EXPECT_DOUBLE_EQ(report.samples_per_second, 3);
  EXPECT_DOUBLE_EQ(report.data_wait_share, 0);
}

}  // namespace
}  // namespace cohort::train

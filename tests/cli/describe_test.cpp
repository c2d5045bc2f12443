// `cohort doctor` and `cohort summary`.
#include <gtest/gtest.h>

#include "cohort/base/cpu.h"
#include "tests/cli/program.h"
#include "tests/support/messages.h"

namespace cohort::test {
namespace {

class DescribeTest : public TrainProgramTest {};

TEST_F(DescribeTest, DoctorAndSummaryAnswer) {
  const Outcome doctor = run({"doctor"});
  EXPECT_EQ(doctor.status, 0);
  for (const char* word : {"LibTorch", "cores", "memory", "cuda", "backends       gloo, ", ", shm"})
    EXPECT_NE(doctor.out.find(word), std::string::npos) << word;
  EXPECT_EQ(doctor.out.find("fake"), std::string::npos) << doctor.out;
  const Outcome summary = run({"summary", "vgg16"});
  EXPECT_EQ(summary.status, 0) << summary.err;
  EXPECT_NE(summary.out.find("138,357,544"), std::string::npos) << summary.out;
}

TEST_F(DescribeTest, SummaryNamesTheInputThatAModelDoesNotTake) {
  const Outcome outcome = run({"summary", "--load", COHORT_TEST_PLUGIN, "plugin_net", "--image-size", "8"});
  EXPECT_EQ(outcome.status, 2);
  expect_in(outcome.err,
            {"[cli.summary] plugin_net on an input of [1, 3, 8, 8]: ", "Try: another --image-size"});
}

TEST_F(DescribeTest, DoctorSaysWhatBoundsTheCores) {
  const std::string online = std::to_string(base::core_limits().online);
  const base::ScopedPin pin(base::CpuSet({base::CpuSet::of_process().ids().front()}));
  const std::string pinned = run({"doctor"}).out;
  EXPECT_NE(pinned.find("1 usable of " + online), std::string::npos) << pinned;
  EXPECT_EQ(pinned.find(", affinity 1") != std::string::npos, online != "1") << pinned;
  const std::string told = Program(dir.path(), {"doctor"}, {{"COHORT_CORES", "77"}}).outcome().out;
  EXPECT_NE(told.find("77 usable of " + online), std::string::npos) << told;
  EXPECT_NE(told.find(", COHORT_CORES 77"), std::string::npos) << told;
}

}  // namespace
}  // namespace cohort::test

#include "cohort/memory/step_memory.h"

#include <gtest/gtest.h>

namespace cohort::memory {
namespace {

TEST(StepMemoryTest, ALineThroughTwoBatchesGivesBytesOfAnySize) {
  const MemoryLine line = LinearFit(2, 4).through(120, 140);
  EXPECT_EQ(line.at(2), 120);
  EXPECT_EQ(line.at(4), 140);
  EXPECT_EQ(line.at(100), 1100);
}

// At 2 and 4 samples the first moment has the peak, at 100 samples the second.
TEST(StepMemoryTest, ThePeakIsTheHighestMomentAtEachSize) {
  StepMemory step;
  LinearFit(2, 4).add_curve(step.curve, {.name = "", .curve = {1002, 20}}, {.name = "", .curve = {1004, 40}});
  ASSERT_EQ(step.curve.size(), 2U);
  EXPECT_EQ(step.peak(4), 1004);
  EXPECT_EQ(step.peak(200), 2000);
  EXPECT_EQ(step.activations(200), 0) << "nothing was held";
}

TEST(StepMemoryTest, PartsWithOtherMomentsHaveOneLineThroughTheirPeaks) {
  std::vector<MemoryLine> lines;
  LinearFit(2, 4).add_curve(lines, {.name = "", .curve = {20, 10}}, {.name = "", .curve = {40}});
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].at(3), 30);
  LinearFit(2, 4).add_curve(lines, {.name = ""}, {.name = "", .curve = {40}});
  EXPECT_EQ(lines.size(), 1U);
}

TEST(StepMemoryTest, ProbesHaveTheSameKernels) {
  std::vector<std::int64_t> probed;
  const auto probe = [&](std::size_t blocks_of_two) {
    return [&, blocks_of_two](std::int64_t samples) {
      probed.push_back(samples);
      return Probe{
          {.name = "", .curve = std::vector<std::int64_t>(samples == 2 ? blocks_of_two : 1, samples)}};
    };
  };
  EXPECT_EQ(probe_twice(probe(1)).samples_of_few, 2);
  EXPECT_EQ(probed, (std::vector<std::int64_t>{2, 4}));
  const ProbePair larger = probe_twice(probe(3));
  EXPECT_EQ(larger.samples_of_few, 4);
  EXPECT_EQ(larger.samples_of_more, 8);
  EXPECT_EQ(larger.few[0].curve, (std::vector<std::int64_t>{4}));
  const ProbePair cut = probe_twice(probe(1), [](std::int64_t each) { return 3 * each + 1; });
  EXPECT_EQ(cut.samples_of_few, 7);
  EXPECT_EQ(cut.samples_of_more, 13);
}

}  // namespace
}  // namespace cohort::memory

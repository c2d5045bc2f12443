#include "cohort/base/placement.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

// A process that may use cores 4, 5, 8 and 9 of its machine.
const CpuSet kAllowed({4, 5, 8, 9});

Placement parse(std::string_view text) {
  return Placement::parse(text, kAllowed);
}

TEST(PlacementTest, CpuAloneIsEveryCoreOfTheProcess) {
  const Placement placement = parse("cpu");
  EXPECT_EQ(placement.device, "cpu");
  EXPECT_TRUE(placement.is_cpu());
  EXPECT_EQ(placement.cpus, kAllowed);
}

TEST(PlacementTest, CoreKIsTheKthThatTheProcessMayUse) {
  EXPECT_EQ(parse("cpu:0").cpus.ids(), std::vector<int>{4});
  EXPECT_EQ(parse("cpu:2").cpus.ids(), std::vector<int>{8});
  EXPECT_EQ(parse("cpu:2-3").cpus.ids(), (std::vector<int>{8, 9}));
  EXPECT_EQ(parse("cpu:0,2").cpus.ids(), (std::vector<int>{4, 8}));
}

TEST(PlacementTest, NameAfterTheSlashMakesASecondPlaceOnTheSameCores) {
  EXPECT_EQ(parse("cpu:0/a").cpus, parse("cpu:0/b").cpus);
  EXPECT_NE(parse("cpu:0/a"), parse("cpu:0/b"));
  EXPECT_NE(parse("cpu:0/a"), parse("cpu:0"));
  EXPECT_EQ(parse("cpu:0/a").name, "cpu:0/a");
}

TEST(PlacementTest, SamePlaceWrittenTwoWaysIsEqual) {
  EXPECT_EQ(parse("cpu:0,1"), parse("cpu:0-1"));
  EXPECT_EQ(parse("cuda"), parse("cuda:0"));
}

TEST(PlacementTest, GpuKeepsItsNumberAndEveryHostCore) {
  const Placement placement = parse("cuda:3");
  EXPECT_EQ(placement.device, "cuda:3");
  EXPECT_FALSE(placement.is_cpu());
  EXPECT_EQ(placement.cpus, kAllowed);
}

TEST(PlacementTest, RejectsCoresThatTheProcessMayNotUseSayingWhichItMay) {
  COHORT_EXPECT_THROW_WITH(parse("cpu:4"), ConfigError,
                           "placement \"cpu:4\": core 4 is asked for, but this process may use 4 cores (the "
                           "machine's 4-5,8-9). Try: cpu:0 to cpu:3");
  COHORT_EXPECT_THROW_WITH(Placement::parse("cpu:1", CpuSet({0})), ConfigError, "may use 1 core (");
}

TEST(PlacementTest, RejectsOtherTextShowingTheNotation) {
  COHORT_EXPECT_THROW_WITH(parse("gpu:0"), ConfigError,
                           "got device \"gpu\", expected cpu or cuda. Try: cpu, cpu:0");
  COHORT_EXPECT_THROW_WITH(parse(""), ConfigError, "placement \"\": is empty");
  COHORT_EXPECT_THROW_WITH(parse("cpu:"), ConfigError, "got \"\" after the colon, expected core numbers");
  COHORT_EXPECT_THROW_WITH(parse("cpu:x"), ConfigError, "got \"x\" after the colon");
  COHORT_EXPECT_THROW_WITH(parse("cpu:0/"), ConfigError, "after the slash, expected letters");
  COHORT_EXPECT_THROW_WITH(parse("cpu:0/a b"), ConfigError, "got \"a b\" after the slash");
  COHORT_EXPECT_THROW_WITH(parse("cuda:-1"), ConfigError, "got \"-1\", expected the number of a GPU");
  COHORT_EXPECT_THROW_WITH(parse("cuda:999"), ConfigError, "got \"999\", expected the number of a GPU");
}

TEST(PlacementTest, ListsAreSplitAtCommasBetweenPlaces) {
  const std::vector<Placement> list = parse_placements("cpu:0/a, cpu:0/b cuda:1,cpu:0,cuda", kAllowed);
  ASSERT_EQ(list.size(), 5u);
  EXPECT_EQ(list[0].name, "cpu:0/a");
  EXPECT_EQ(list[1].name, "cpu:0/b");
  EXPECT_EQ(list[2].name, "cuda:1");
  EXPECT_EQ(list[3].name, "cpu:0");
  EXPECT_EQ(list[4].name, "cuda:0");
  COHORT_EXPECT_THROW_WITH(parse_placements(" , ", kAllowed), ConfigError, "names no place");
}

TEST(PlacementTest, CommaBeforeANumberBelongsToThePlace) {
  const std::vector<Placement> list = parse_placements("cpu:0,1,cpu:1", kAllowed);
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0].cpus.size(), 2);
}

}  // namespace
}  // namespace cohort::base

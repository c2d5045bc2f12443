#include "cohort/base/text/nearest_name.h"

#include <gtest/gtest.h>

#include <vector>

namespace cohort::base {
namespace {

TEST(NearestNameTest, DistanceCountsLettersToChange) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("Batch", "bATCH"), 0u);
  EXPECT_EQ(edit_distance("epohcs", "epochs"), 1u) << "two neighbours that were swapped are one mistake";
}

TEST(NearestNameTest, FindsTheNearestName) {
  const std::vector<std::string> names = {"batch_size", "epochs", "momentum", "lr"};
  EXPECT_EQ(nearest_name("batchsize", names), "batch_size");
  EXPECT_EQ(nearest_name("momentun", names), "momentum");
  EXPECT_EQ(nearest_name("LR", names), "lr");
}

TEST(NearestNameTest, SuggestsNothingWhenNoNameIsNear) {
  EXPECT_EQ(nearest_name("scheduler", std::vector<std::string>{"lr", "epochs"}), std::nullopt);
  EXPECT_EQ(nearest_name("lr", std::vector<std::string>{}), std::nullopt);
}

}  // namespace
}  // namespace cohort::base

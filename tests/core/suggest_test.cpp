#include "cohort/core/suggest.h"

#include <gtest/gtest.h>

#include <vector>

namespace cohort::core {
namespace {

TEST(SuggestTest, DistanceCountsLettersToChange) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("Batch", "bATCH"), 0u);
  EXPECT_EQ(edit_distance("epohcs", "epochs"), 1u) << "two neighbours that were swapped are one mistake";
}

TEST(SuggestTest, FindsTheNearestName) {
  const std::vector<std::string> names = {"batch_size", "epochs", "momentum", "lr"};
  EXPECT_EQ(closest("batchsize", names), "batch_size");
  EXPECT_EQ(closest("momentun", names), "momentum");
  EXPECT_EQ(closest("LR", names), "lr");
}

TEST(SuggestTest, SuggestsNothingWhenNoNameIsNear) {
  EXPECT_EQ(closest("scheduler", std::vector<std::string>{"lr", "epochs"}), std::nullopt);
  EXPECT_EQ(closest("lr", std::vector<std::string>{}), std::nullopt);
}

}  // namespace
}  // namespace cohort::core

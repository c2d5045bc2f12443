#include "cohort/base/text/format_list.h"

#include <gtest/gtest.h>

#include <numeric>

namespace cohort::base {
namespace {

TEST(FormatListTest, NamesEachUpToTwenty) {
  EXPECT_EQ(format_list("rank", {3}), "rank 3");
  EXPECT_EQ(format_list("node", {1, 2}), "nodes 1 and 2");
  EXPECT_EQ(format_list("rank", {1, 2, 5}), "ranks 1, 2 and 5");
  std::vector<int> many(23);
  std::iota(many.begin(), many.end(), 0);
  const std::string text = format_list("rank", many);
  EXPECT_TRUE(text.ends_with(", 18, 19 and 3 more")) << text;
}

TEST(FormatListTest, JoinsTexts) {
  EXPECT_EQ(join({}), "");
  EXPECT_EQ(join({"a"}), "a");
  EXPECT_EQ(join({"a", "b", "c"}), "a, b, c");
}

TEST(TextListTest, PutsSeparatorsBetweenPartsAlsoEmptyOnes) {
  TextList list("; ");
  EXPECT_TRUE(list.empty());
  EXPECT_EQ(list.text(), "");
  list.add("rank ", 3);
  list.add("");
  list.add(1.5, "x");
  EXPECT_FALSE(list.empty());
  EXPECT_EQ(list.text(), "rank 3; ; 1.5x");
  EXPECT_EQ(join({"a", "b"}), "a, b");
  EXPECT_EQ(join({"a", "b", "c"}, " or "), "a or b or c");
}

}  // namespace
}  // namespace cohort::base

#include "cohort/base/text/format_list.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

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

TEST(FormatListTest, CountsInTheSingularAndThePlural) {
  EXPECT_EQ(format_count(0, "rank"), "0 ranks");
  EXPECT_EQ(format_count(1, "rank"), "1 rank");
  EXPECT_EQ(format_count(-2, "virtual rank"), "-2 virtual ranks");
}

TEST(FormatListTest, JoinsTexts) {
  EXPECT_EQ(join({}), "");
  EXPECT_EQ(join({"a"}), "a");
  EXPECT_EQ(join({"a", "b", "c"}), "a, b, c");
}

TEST(FormatListTest, JoinsWhateverHasATextOfItsOwn) {
  EXPECT_EQ(join(std::vector<std::int64_t>{2, 3, 4}, " x "), "2 x 3 x 4");
  EXPECT_EQ(join(std::set<std::string>{"b", "a"}, ", or "), "a, or b");
  EXPECT_EQ(join(std::vector<double>()), "");
  EXPECT_EQ(join(std::vector<double>{0.5, 0.25}), "0.5, 0.25");
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

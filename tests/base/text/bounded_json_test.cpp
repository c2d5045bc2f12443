#include "cohort/base/text/bounded_json.h"

#include <gtest/gtest.h>

#include <string>

namespace cohort::base {
namespace {

std::string nested(int depth, char open, char close, const std::string& before = "") {
  std::string text;
  for (int i = 0; i < depth; ++i) text += (i == 0 ? "" : before) + open;
  return text + std::string(static_cast<size_t>(depth), close);
}

TEST(BoundedJsonTest, TextAtTheDepthLimitIsReadAndDeeperTextIsNot) {
  EXPECT_TRUE(parse_bounded_json(nested(kMaxJsonDepth, '[', ']')));
  EXPECT_FALSE(parse_bounded_json(nested(kMaxJsonDepth + 1, '[', ']')));
  EXPECT_TRUE(parse_bounded_json(nested(kMaxJsonDepth, '{', '}', "\"a\":")));
  EXPECT_FALSE(parse_bounded_json(nested(kMaxJsonDepth + 1, '{', '}', "\"a\":")));
  EXPECT_FALSE(parse_bounded_json(nested(5'000'000, '[', ']')));
  EXPECT_FALSE(parse_bounded_json(std::string(5'000'000, '[')));
}

TEST(BoundedJsonTest, WidthIsNoDepth) {
  std::string text = "[";
  for (int i = 0; i < 1000; ++i) text += "{\"a\": [1]},";
  const auto document = parse_bounded_json(text + "[]]");
  ASSERT_TRUE(document.has_value());
  EXPECT_EQ(document->size(), 1001u);
}

TEST(BoundedJsonTest, LongTextIsNotRead) {
  std::string text(kMaxJsonBytes, ' ');
  text[0] = '1';
  EXPECT_TRUE(parse_bounded_json(text));
  EXPECT_FALSE(parse_bounded_json(text + " "));
}

TEST(BoundedJsonTest, WhatIsNoJsonIsNothing) {
  for (const char* text : {"", "{", "[1,]", "1 2", "\"\xff\"", "1e999", "]"}) {
    EXPECT_FALSE(parse_bounded_json(text)) << text;
  }
}

}  // namespace
}  // namespace cohort::base

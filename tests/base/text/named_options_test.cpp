#include "cohort/base/text/named_options.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/base/error_context.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

NamedOptions sample() {
  return NamedOptions{{"depth", "3"}, {"rate", "0.5"}, {"raw", "yes"}, {"name", "a b"}}.handed_to(
      "mine.options", "net 'x'");
}

TEST(NamedOptionsTest, ReadsByType) {
  const NamedOptions options = sample();
  EXPECT_EQ(options.integer("depth", 1), 3);
  EXPECT_EQ(options.number("rate", 1), 0.5);
  EXPECT_EQ(options.number("depth", 1), 3.0);
  EXPECT_TRUE(options.flag("raw", false));
  EXPECT_EQ(options.text("name", ""), "a b");
  EXPECT_EQ(options.at("name"), "a b");
  EXPECT_EQ(options.integer("none", 4), 4);
  EXPECT_EQ(options.number("none", 0.25), 0.25);
  EXPECT_FALSE(options.flag("none", false));
  EXPECT_EQ(options.text("none", "z"), "z");
  EXPECT_NO_THROW(options.reject_unread());
}

TEST(NamedOptionsTest, ATextOfAnotherTypeIsNamed) {
  const NamedOptions options = sample();
  COHORT_EXPECT_THROW_WITH(options.integer("rate", 1), ConfigError,
                           "[mine.options] net 'x': option rate is '0.5', expected a whole number");
  COHORT_EXPECT_THROW_WITH(options.integer("depth", 1, 4), ConfigError, "is '3', expected at least 4");
  COHORT_EXPECT_THROW_WITH(options.integer("depth", 1, 0, 2), ConfigError, "is '3', expected 0 to 2");
  COHORT_EXPECT_THROW_WITH(options.number("name", 1), ConfigError, "is 'a b', expected a number");
  COHORT_EXPECT_THROW_WITH(NamedOptions({{"x", "nan"}}).number("x", 1), ConfigError, "expected a number");
  COHORT_EXPECT_THROW_WITH(NamedOptions({{"x", ""}}).integer("x", 1), ConfigError, "expected a whole number");
  COHORT_EXPECT_THROW_WITH(options.flag("name", true), ConfigError, "expected true or false");
  COHORT_EXPECT_THROW_WITH(options.at("dept"), ConfigError,
                           "net 'x' needs option dept. Try: dept instead of depth");
}

TEST(NamedOptionsTest, WhatNobodyAskedForIsRejected) {
  const NamedOptions options{{"widht", "3"}, {"path", "p"}};
  const NamedOptions given = options.handed_to("mine.options", "net 'x'");
  COHORT_EXPECT_THROW_WITH(given.reject_unread(), ConfigError,
                           "net 'x' has no option path. Try: leaving it out");
  given.integer("width", 1);
  COHORT_EXPECT_THROW_WITH(given.reject_unread({"path"}), ConfigError,
                           "net 'x' has no option widht. Try: width; its options are width");
  // A copy, which a model keeps, asks for all; who hands them out again begins anew.
  const NamedOptions copy = given;
  EXPECT_EQ(copy.count("widht"), 1U);
  EXPECT_NO_THROW(given.reject_unread({"path"}));
  COHORT_EXPECT_THROW_WITH(given.handed_to("", "").reject_unread({"path"}), ConfigError, "no option widht");
  // Who walks over all of them has read all.
  for (const auto& [name, value] : given) EXPECT_FALSE(value.empty()) << name;
  EXPECT_NO_THROW(given.reject_unread());
}

TEST(ErrorContextTest, SaysWhatWasBeingDoneAndKeepsTheType) {
  const auto fail = [](const auto& error) {
    with_context<DataError>("mine.make", "making x", [&]() -> int { throw error; });
  };
  COHORT_EXPECT_THROW_WITH(fail(std::out_of_range("map::at")), DataError,
                           "[mine.make] while making x: map::at");
  COHORT_EXPECT_THROW_WITH(fail(ConfigError("a.b", "no")), ConfigError,
                           "[mine.make] while making x: [a.b] no");
  COHORT_EXPECT_THROW_WITH(fail(SystemError("a.b", "no")), SystemError, "while making x: [a.b] no");
  COHORT_EXPECT_THROW_WITH(fail(UsageError("a.b", "no")), UsageError, "while making x: [a.b] no");
  COHORT_EXPECT_THROW_WITH(fail(TimeoutError("a.b", "late")), TimeoutError, "[a.b] late");
  EXPECT_EQ(with_context<DataError>("a", "b", [] { return 3; }), 3);
}

}  // namespace
}  // namespace cohort::base

#include "cohort/base/text/make_named.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>

#include "tests/support/throws.h"

namespace cohort::base {
namespace {

template <typename Make>
auto made(const NamedOptions& given, const Make& make) {
  return make_named<DataError>("a.registry", "a.options", "thing 'x'", given, make, {"path"});
}

TEST(MakeNamedTest, TheFactoryGetsItsOptionsAndMayLeaveIgnoredOnes) {
  const auto read = [](const NamedOptions& options) { return options.integer("width", 0) + 1; };
  EXPECT_EQ(made({{"width", "7"}, {"path", "p"}}, read), 8);
  COHORT_EXPECT_THROW_WITH(made({{"widht", "7"}}, read), ConfigError, "widht");
}

TEST(MakeNamedTest, WhatTheFactoryThrowsSaysWhatWasBeingMade) {
  const auto foreign = [](const NamedOptions&) -> int { throw std::runtime_error("oh"); };
  COHORT_EXPECT_THROW_WITH(made({}, foreign), DataError, "[a.registry] while making thing 'x': oh");
  const auto own = [](const NamedOptions&) -> int { throw UsageError("b.c", "no"); };
  COHORT_EXPECT_THROW_WITH(made({}, own), UsageError, "while making thing 'x': [b.c] no");
}

TEST(MakeNamedTest, NothingIsNoResult) {
  const auto nothing = [](const NamedOptions&) { return std::unique_ptr<int>(); };
  COHORT_EXPECT_THROW_WITH(made({}, nothing), UsageError, "the factory of thing 'x' returned nothing");
}

TEST(MakeNamedTest, AFactoryWithoutExtraRejectsEveryOption) {
  struct Options {
    std::string name;
    NamedOptions extra;
  };
  const auto twice = without_extra("thing", "a.options", [](const Options&, int value) { return 2 * value; });
  EXPECT_EQ(twice(Options{"x", {}}, 3), 6);
  COHORT_EXPECT_THROW_WITH(twice(Options{"x", {{"width", "7"}}}, 3), ConfigError,
                           "[a.options] thing 'x' has no option width");
}

}  // namespace
}  // namespace cohort::base

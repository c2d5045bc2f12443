#include "cohort/base/text/choice.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/header_examples.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

TEST(ChoiceTest, TheExampleOfTheHeaderFindsTheValue) {
  // clang-format off
  constexpr base::Choice<int> kLevels[] = {{"low", 1}, {"high", 9}};
  const int level = base::choose<ConfigError>("zip.open", "zip.level", "high", kLevels);
  // clang-format on
  EXPECT_EQ(level, 9);
  EXPECT_EQ(base::choose<ConfigError>("zip.open", "zip.level", "low", kLevels), 1);
  const std::string here = test::read_file(test::source_dir() / "tests/base/text/choice_test.cpp");
  const std::vector<std::string> lines = test::example_of("base/text/choice.h");
  EXPECT_EQ(lines.size(), 2U);
  EXPECT_EQ(test::first_missing(lines, here), "");
}

TEST(ChoiceTest, AnotherNameIsRejectedWithAll) {
  constexpr Choice<int> kSizes[] = {{"one", 1}, {"two", 2}};
  COHORT_EXPECT_THROW_WITH((choose<UsageError>("base.test", "a size", "on", kSizes)), UsageError,
                           "[base.test] a size: got 'on', expected one of one, two");
  COHORT_EXPECT_THROW_WITH((choose<ConfigError>("base.test", "a size", "", kSizes)), ConfigError,
                           "a size: got '', expected one of one, two");
}

}  // namespace
}  // namespace cohort::base

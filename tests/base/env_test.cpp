#include "cohort/base/env.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "cohort/base/error.h"
#include "tests/support/environment.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

using test::ScopedEnv;
const std::string kName = "COHORT_TEST_VARIABLE";

TEST(EnvTest, UnsetAndEmptyVariablesAreAbsent) {
  for (const std::optional<std::string>& value :
       {std::optional<std::string>(), std::optional<std::string>("")}) {
    const ScopedEnv env(kName, value);
    EXPECT_EQ(env_string(kName), std::nullopt);
    EXPECT_EQ(env_int(kName), std::nullopt);
    EXPECT_EQ(env_double(kName), std::nullopt);
    EXPECT_EQ(env_bool(kName), std::nullopt);
  }
}

TEST(EnvTest, ReadsWholeNumbers) {
  const ScopedEnv env(kName, "-12");
  EXPECT_EQ(env_int(kName), -12);
  EXPECT_EQ(env_string(kName), "-12");
}

TEST(EnvTest, RejectsWhatIsNoWholeNumberNamingVariableAndValue) {
  for (const char* value : {"12x", " 12", "1.5", "99999999999999999999", "0x10"}) {
    const ScopedEnv env(kName, value);
    COHORT_EXPECT_THROW_WITH(
        env_int(kName), ConfigError,
        std::string("COHORT_TEST_VARIABLE: got \"") + value + "\", expected a whole number");
  }
}

TEST(EnvTest, RejectsNumbersOutOfRangeSayingTheRange) {
  const ScopedEnv env(kName, "0");
  COHORT_EXPECT_THROW_WITH(env_int(kName, 1), ConfigError, "expected a whole number of at least 1");
  COHORT_EXPECT_THROW_WITH(env_int(kName, 1, 8), ConfigError, "expected a whole number from 1 to 8");
  EXPECT_EQ(env_int(kName, 0, 8), 0);
}

TEST(EnvTest, ReadsNumbersAndRejectsOthers) {
  {
    const ScopedEnv env(kName, "2.5e-3");
    EXPECT_EQ(env_double(kName), 2.5e-3);
  }
  for (const char* value : {"nan", "inf", "1,5", "fast"}) {
    const ScopedEnv env(kName, value);
    COHORT_EXPECT_THROW_WITH(env_double(kName), ConfigError, "expected a number");
  }
}

TEST(EnvTest, ReadsYesAndNoInEverySpelling) {
  for (const char* value : {"1", "true", "Yes", "ON"}) {
    const ScopedEnv env(kName, value);
    EXPECT_EQ(env_bool(kName), true) << value;
  }
  for (const char* value : {"0", "False", "no", "off"}) {
    const ScopedEnv env(kName, value);
    EXPECT_EQ(env_bool(kName), false) << value;
  }
  const ScopedEnv env(kName, "maybe");
  COHORT_EXPECT_THROW_WITH(env_bool(kName), ConfigError, "got \"maybe\", expected 1, true, yes, on or 0");
}

TEST(EnvTest, ReadsOneOfSeveralChoices) {
  const std::array<std::string, 2> choices = {"tuned", "system"};
  {
    const ScopedEnv env(kName, "System");
    EXPECT_EQ(env_choice(kName, choices), "system");
  }
  const ScopedEnv env(kName, "fast");
  COHORT_EXPECT_THROW_WITH(env_choice(kName, choices), ConfigError, "expected one of tuned, system");
}

TEST(EnvTest, MisspeltVariablesOfCohortAreFoundWithTheNearestName) {
  const ScopedEnv misspelt("COHORT_LGO", "debug");
  const ScopedEnv strange("COHORT_SOMETHING_ELSE_ALTOGETHER", "1");
  const ScopedEnv right("COHORT_CORES", "2");
  const std::vector<std::string> messages = unknown_cohort_variables();
  const auto has = [&](const std::string& text) {
    return std::count(messages.begin(), messages.end(), text) == 1;
  };
  EXPECT_TRUE(has("environment variable COHORT_LGO is not read by Cohort; did you mean COHORT_LOG?"));
  EXPECT_TRUE(has("environment variable COHORT_SOMETHING_ELSE_ALTOGETHER is not read by Cohort"));
  EXPECT_TRUE(std::none_of(messages.begin(), messages.end(),
                           [](const std::string& m) { return m.find("variable COHORT_CORES") != m.npos; }));
}

TEST(EnvTest, ListOfVariablesIsSortedAndSaysWhatEachMeans) {
  const auto variables = cohort_variables();
  EXPECT_TRUE(std::is_sorted(variables.begin(), variables.end(),
                             [](const EnvVariable& a, const EnvVariable& b) { return a.name < b.name; }));
  for (const EnvVariable& variable : variables) EXPECT_GT(variable.meaning.size(), 20u) << variable.name;
}

}  // namespace
}  // namespace cohort::base

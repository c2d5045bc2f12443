#include "cohort/base/registry.h"

#include <gtest/gtest.h>

#include "tests/support/throws.h"

namespace cohort::base {
namespace {

TEST(RegistryTest, AThingIsFoundByItsName) {
  Registry<int> registry("number", "base.numbers", {{"two", 2}, {"one", 1}});
  registry.add("three", 3, "a test");
  EXPECT_EQ(registry.get("one"), 1);
  EXPECT_EQ(registry.get("three"), 3);
  EXPECT_EQ(registry.find("four"), std::nullopt);
  EXPECT_EQ(registry.names(), (std::vector<std::string>{"one", "three", "two"}));
}

TEST(RegistryTest, UnknownNamesAreRejectedWithTheNearestAndAll) {
  Registry<int> registry("number", "base.numbers", {{"seven", 7}, {"eight", 8}});
  COHORT_EXPECT_THROW_WITH(
      registry.get("sevem"), UsageError,
      "there is no number 'sevem'. Try: seven; the numbers are eight, seven; one of your own");
}

TEST(RegistryTest, ANameIsTakenOnce) {
  Registry<int> registry("number", "base.numbers", {{"one", 1}});
  COHORT_EXPECT_THROW_WITH(registry.add("one", 11, "a test"), UsageError,
                           "the number 'one' is registered already, by Cohort");
  COHORT_EXPECT_THROW_WITH(registry.add("", 0, "a test"), UsageError, "the name of the number is empty");
  EXPECT_EQ(registry.get("one"), 1);
}

TEST(RegistryTest, AReservedNameIsTakenAndHasNoThing) {
  Registry<int> registry("number", "base.numbers", {{"one", 1}}, {"auto"});
  EXPECT_EQ(registry.find("auto"), std::nullopt);
  EXPECT_EQ(registry.names(), std::vector<std::string>{"one"});
  COHORT_EXPECT_THROW_WITH(registry.get("auto"), UsageError, "there is no number 'auto'");
  COHORT_EXPECT_THROW_WITH(registry.add("auto", 7, "a test"), UsageError,
                           "the number 'auto' is registered already, by Cohort");
  EXPECT_NO_THROW(registry.check("auto"));
  EXPECT_FALSE(registry.add_at_load("auto", 7, "a.cpp", 3));
  COHORT_EXPECT_THROW_WITH(registry.check("auto"), UsageError, "registered twice: by Cohort and by a.cpp:3");
  EXPECT_EQ(registry.find("auto"), std::nullopt);
}

TEST(RegistryTest, ReservedNamesAreListedForACallerWhoTakesThem) {
  const Registry<int> registry("number", "base.numbers", {{"one", 1}}, {"auto"});
  EXPECT_EQ(registry.names(RegistryNames::kAll), (std::vector<std::string>{"auto", "one"}));
  COHORT_EXPECT_THROW_WITH(registry.get("aut"), UsageError, "Try: the numbers are one; ");
  COHORT_EXPECT_THROW_WITH(registry.get("aut", RegistryNames::kAll), UsageError,
                           "there is no number 'aut'. Try: auto; the numbers are auto, one; ");
}

TEST(RegistryTest, WhatTwoLibrariesRegisterIsAnErrorWhenItIsUsed) {
  Registry<int> registry("number", "base.numbers", {});
  EXPECT_TRUE(registry.add_at_load("one", 1, "a.cpp", 3));
  EXPECT_EQ(registry.get("one"), 1);
  EXPECT_FALSE(registry.add_at_load("one", 11, "b.cpp", 4));
  COHORT_EXPECT_THROW_WITH(registry.get("one"), UsageError,
                           "the number 'one' was registered twice: by a.cpp:3 and by b.cpp:4");
  COHORT_EXPECT_THROW_WITH(registry.check("one"), UsageError, "registered twice");
  EXPECT_NO_THROW(registry.check("two"));
}

}  // namespace
}  // namespace cohort::base

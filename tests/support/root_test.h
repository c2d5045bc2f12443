#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

/// COHORT_ROOT_TEST(Suite, Name) { ... } and COHORT_ROOT_TEST_F(Fixture, Name) { ... }: TEST and TEST_F of
/// what root alone can do, as to be another user. Other users do not have the test: one that returned at once
/// would pass without a check.
#define COHORT_ROOT_TEST(Suite, Name) COHORT_ROOT_TEST_OF(Suite, Name, ::testing::Test)
#define COHORT_ROOT_TEST_F(Fixture, Name) COHORT_ROOT_TEST_OF(Fixture, Name, Fixture)

#define COHORT_ROOT_TEST_OF(Suite, Name, Fixture)                                                     \
  class Suite##Name final : public Fixture {                                                          \
    void TestBody() override;                                                                         \
  };                                                                                                  \
  [[maybe_unused]] const ::testing::TestInfo* const k##Suite##Name =                                  \
      ::geteuid() != 0 ? nullptr                                                                      \
                       : ::testing::RegisterTest(#Suite, #Name, nullptr, nullptr, __FILE__, __LINE__, \
                                                 []() -> Fixture* { return new Suite##Name; });       \
  void Suite##Name::TestBody()

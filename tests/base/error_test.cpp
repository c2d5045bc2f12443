#include "cohort/base/error.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include "tests/support/throws.h"

namespace cohort {
namespace {

TEST(ErrorTest, MessageSaysWhereWhatAndWhatToDo) {
  const DataError error("data.idx", base::concat("a.idx: got magic ", 7, ", expected ", 0x803),
                        "another file");
  EXPECT_STREQ(error.what(), "[data.idx] a.idx: got magic 7, expected 2051. Try: another file");
}

TEST(ErrorTest, MessageWithoutHintEndsAfterWhat) {
  EXPECT_STREQ(SystemError("base.lock", "cannot open x").what(), "[base.lock] cannot open x");
}

TEST(ErrorTest, EveryTypeIsACohortErrorAndARuntimeError) {
  COHORT_EXPECT_THROW_WITH(throw ConfigError("a.b", "c"), Error, "[a.b] c");
  COHORT_EXPECT_THROW_WITH(throw TimeoutError("a.b", "c"), std::runtime_error, "[a.b] c");
}

TEST(ThrowsTest, FailsForAnotherTypeAnotherMessageAndNoException) {
  EXPECT_NONFATAL_FAILURE(COHORT_EXPECT_THROW_WITH(throw UsageError("a.b", "c"), DataError, "c"),
                          "threw something other than DataError");
  EXPECT_NONFATAL_FAILURE(COHORT_EXPECT_THROW_WITH(throw DataError("a.b", "c"), DataError, "d"),
                          "expected a message");
  EXPECT_NONFATAL_FAILURE(COHORT_EXPECT_THROW_WITH(1 + 1, DataError, "d"), "threw nothing");
}

}  // namespace
}  // namespace cohort

#include "cohort/elastic/internal/arithmetic.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

TEST(ElasticArithmeticTest, AProcessTakesTheThreadsOfAnotherOne) {
  const Arithmetic before = Arithmetic::of_thread();
  Arithmetic other = before;
  other.threads += 2;
  compute_as(other, "process 3");
  EXPECT_EQ(at::get_num_threads(), other.threads);
  EXPECT_EQ(Arithmetic::of_thread(), other);
  compute_as(before, "process 3");
  EXPECT_EQ(at::get_num_threads(), before.threads);
}

TEST(ElasticArithmeticTest, OtherInstructionsAreAnError) {
  Arithmetic other = Arithmetic::of_thread();
  other.instructions = "AVX1024";
  COHORT_EXPECT_THROW_WITH(compute_as(other, "process 3"), UsageError, "process 3 with AVX1024: the bits");
}

TEST(ElasticArithmeticTest, ItIsReadAsItWasWritten) {
  const Arithmetic arithmetic{.threads = 12, .instructions = "NO AVX"};
  EXPECT_EQ(Arithmetic::parse(arithmetic.to_text()), arithmetic);
  for (const char* const text : {"", "12", "AVX2 12"})
    COHORT_EXPECT_THROW_WITH(Arithmetic::parse(text), CommError, "did not say how it computes");
}

}  // namespace
}  // namespace cohort::elastic

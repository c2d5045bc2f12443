#include "cohort/comm/text_collectives.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/ranks.h"
#include "tests/support/throws.h"

namespace cohort {
namespace {

TEST(TextCollectivesTest, EveryRankGetsTheRootsTextWhateverItsLength) {
  for (const std::string& text : {std::string(), std::string("a\0b", 3), std::string(100'000, 'x')}) {
    test::run_ranks(3, "gloo", [&](comm::Group& group) {
      EXPECT_EQ(comm::broadcast_text(group, group.rank() == 1 ? text : "other", 1), text);
    });
  }
}

TEST(TextCollectivesTest, TextsOfAllLengthsAreGathered) {
  test::run_ranks(3, "gloo", [](comm::Group& group) {
    const std::vector<std::string> texts = comm::all_gather_text(group, std::string(group.rank() * 5, 'r'));
    EXPECT_EQ(texts, (std::vector<std::string>{"", "rrrrr", "rrrrrrrrrr"}));
  });
}

TEST(TextCollectivesTest, WhatIsNotTheSameIsNamedOnEveryRankWithItsFirstLine) {
  test::run_ranks(3, "gloo", [](comm::Group& group) {
    comm::require_same(group, "the model", "a\nb\n");
    const std::string text = group.rank() == 2 ? "a\nc\n" : "a\nb\n";
    COHORT_EXPECT_THROW_WITH(comm::require_same(group, "the model", text), UsageError,
                             "the model is not the same on all ranks: rank 0 has 'b', rank 2 has 'c'");
    COHORT_EXPECT_THROW_WITH(comm::require_same(group, "it", group.rank() == 1 ? "" : "x"), UsageError,
                             "rank 0 has 'x', rank 1 has nothing");
  });
}

}  // namespace
}  // namespace cohort

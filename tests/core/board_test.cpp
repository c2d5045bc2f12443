#include "cohort/core/board.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/support/map_board.h"
#include "tests/support/throws.h"

namespace cohort::core {
namespace {

using std::chrono::milliseconds;

TEST(BoardTest, RanksThatHaveNotComeAtTheDeadlineAreReturned) {
  test::MapBoard board;
  for (const char* key : {"here/0", "here/2", "there/1"}) board.set(key, "1");
  const Deadline deadline(milliseconds(50));
  EXPECT_EQ(missing_ranks(board, "here", 4, deadline), (std::vector<int>{1, 3}));
  EXPECT_TRUE(deadline.expired());
}

TEST(BoardTest, TheWaitEndsWhenTheLastRankHasCome) {
  test::MapBoard board;
  board.set("here/0", "1");
  std::thread last([&] {
    std::this_thread::sleep_for(milliseconds(20));
    board.set("here/1", "1");
  });
  const Deadline deadline(std::chrono::seconds(60));
  EXPECT_EQ(missing_ranks(board, "here", 2, deadline), std::vector<int>{});
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(10));
  last.join();
}

TEST(BoardTest, ABoardThatBreaksEndsTheWait) {
  test::MapBoard board;
  board.break_it("the store is gone");
  COHORT_EXPECT_THROW_WITH(missing_ranks(board, "here", 2, Deadline::never()), std::runtime_error,
                           "the store is gone");
}

}  // namespace
}  // namespace cohort::core

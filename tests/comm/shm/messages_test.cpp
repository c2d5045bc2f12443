#include "cohort/comm/backends/shm/internal/messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cohort/base/error.h"
#include "tests/comm/shm/ranks.h"
#include "tests/support/throws.h"

namespace cohort::comm::shm {
namespace {

TEST(ShmMessagesTest, ComeByTagInAnyOrderAndBothWaysAtOnce) {
  run_threads(2, [](Rank& rank) {
    const int other = 1 - rank.rank();
    // Far more than a ring holds, both ways at once, beside small ones with another tag that are asked for
    // first.
    std::vector<int> large(300'000, rank.rank()), first(3, 10 + rank.rank()), second(3, 20 + rank.rank());
    std::vector<int> got_large(300'000), got_first(3), got_second(3);
    int source = -1;
    const auto a = rank.send(other, first, 1);
    const auto b = rank.send(other, second, 2);
    const auto c = rank.send(other, large, 3);
    rank.wait(rank.recv(other, got_second, 2, &source));
    EXPECT_EQ(source, other);
    EXPECT_EQ(got_second, std::vector<int>(3, 20 + other));
    rank.wait(rank.recv(other, got_large, 3, &source));
    rank.wait(rank.recv(-1, got_first, 1, &source));
    EXPECT_EQ(source, other);
    EXPECT_EQ(got_first, std::vector<int>(3, 10 + other));
    EXPECT_EQ(got_large, std::vector<int>(300'000, other));
    for (const auto& operation : {a, b, c}) rank.wait(operation);
    // An early message that is asked for while it still comes.
    std::vector<int> again(3), last(1, 7), got_last(1);
    const auto d = rank.send(other, large, 4);
    const auto e = rank.send(other, last, 5);
    const auto wants_last = rank.recv(other, got_last, 5, &source);
    std::vector<int> got_again(300'000);
    const auto wants_large = rank.recv(other, got_again, 4, &source);
    rank.wait(wants_last);
    rank.wait(wants_large);
    EXPECT_EQ(got_last[0], 7);
    EXPECT_EQ(got_again, std::vector<int>(300'000, other));
    rank.wait(d);
    rank.wait(e);
  });
}

TEST(ShmMessagesTest, AnySourceTakesTheOneThatComes) {
  run_threads(3, [](Rank& rank) {
    if (rank.rank() != 0) {
      std::vector<int> message(5, rank.rank());
      rank.wait(rank.send(0, message, 9));
      return rank.run([&] { return barrier(rank.ranks()); });
    }
    std::vector<int> seen;
    for (int i = 0; i < 2; ++i) {
      std::vector<int> got(5);
      int source = -1;
      rank.wait(rank.recv(-1, got, 9, &source));
      EXPECT_EQ(got, std::vector<int>(5, source));
      seen.push_back(source);
    }
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, (std::vector<int>{1, 2}));
    rank.run([&] { return barrier(rank.ranks()); });
  });
}

TEST(ShmMessagesTest, AMessageOfAnotherSizeIsAnError) {
  run_threads(2, [](Rank& rank) {
    std::vector<int> data(rank.rank() == 0 ? 3 : 4);
    int source = -1;
    if (rank.rank() == 0) {
      rank.wait(rank.send(1, data, 1));
      COHORT_EXPECT_THROW_WITH(
          rank.run([&] { return barrier(rank.ranks()); }), PeerError,
          "rank 1 gave up: recv 0 of rank 1/2: [comm.shm] rank 0 sent 12 bytes with tag 1");
    } else {
      COHORT_EXPECT_THROW_WITH(rank.wait(rank.recv(0, data, 1, &source)), UsageError,
                               "rank 0 sent 12 bytes with tag 1, expected 16");
    }
  });
}

}  // namespace
}  // namespace cohort::comm::shm

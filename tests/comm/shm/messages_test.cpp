#include "cohort/comm/backends/shm/internal/messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "tests/comm/shm/ranks.h"
#include "tests/support/comes_true.h"
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

// By hand, without the engine, which ends all operations once one has failed.
class HandRunMessagesTest : public testing::Test {
 protected:
  using Ints = std::vector<int>;
  // Rank 0 sends with the engine. Both come to a barrier at the end.
  static void run(const std::function<void(Rank&)>& send, const std::function<void(Rank&, Messages&)>& recv) {
    run_threads(2, [&](Rank& rank) {
      rank.rank() == 0 ? send(rank) : recv(rank, rank.engine().messages());
      rank.run([&] { return barrier(rank.ranks()); });
    });
  }
  static void send(Rank& rank, Ints data, int tag) { rank.wait(rank.send(1, data, tag)); }
  static void finish(Task task) {
    EXPECT_TRUE(test::comes_true([&] { return task.advance(); }));
  }
  static void expect(Messages& messages, int tag, const Ints& wanted) {
    Ints got(wanted.size());
    int source = -1;
    finish(messages.recv(0, Rank::span(got), tag, &source));
    EXPECT_EQ(got, wanted);
    EXPECT_EQ(source, 0);
  }
  static void expect_another_size(Messages& messages, int tag, const std::string& error) {
    Ints got(4);
    int source = -1;
    COHORT_EXPECT_THROW_WITH(finish(messages.recv(0, Rank::span(got), tag, &source)), UsageError, error);
  }
};

TEST_F(HandRunMessagesTest, AMessageOfAnotherSizeIsLeftToTheNextReceive) {
  run(
      [](Rank& rank) {
        send(rank, {7, 8}, 1);
        send(rank, {1, 2, 3}, 1);
        send(rank, {4, 5}, 1);
      },
      [](Rank&, Messages& messages) {
        expect(messages, 1, {7, 8});
        expect_another_size(messages, 1, "rank 0 sent 12 bytes with tag 1, expected 16");
        expect(messages, 1, {1, 2, 3});
        expect(messages, 1, {4, 5});
      });
}

TEST_F(HandRunMessagesTest, AnEarlyMessageOfAnotherSizeIsLeftToTheNextReceive) {
  run(
      [](Rank& rank) {
        send(rank, {1, 2, 3}, 1);
        send(rank, {4}, 2);
      },
      [](Rank&, Messages& messages) {
        expect(messages, 2, {4});
        expect_another_size(messages, 1, "rank 0 sent 12 bytes with tag 1, expected 16");
        expect(messages, 1, {1, 2, 3});
      });
}

TEST_F(HandRunMessagesTest, AReceiveThatEndsBeforeItsMessageComesTakesNone) {
  std::atomic<bool> is_over{false};
  run(
      [&](Rank& rank) {
        test::wait_until([&] { return is_over.load(); });
        send(rank, {1}, 1);
      },
      [&](Rank&, Messages& messages) {
        {
          Ints got(1);
          int source = -1;
          Task task = messages.recv(0, Rank::span(got), 1, &source);
          EXPECT_FALSE(task.advance());
        }
        is_over = true;
        expect(messages, 1, {1});
      });
}

// Of a message that no ring holds, or of one that comes before it was asked for.
TEST_F(HandRunMessagesTest, AReceiveThatEndsInItsMessageLeavesTheNextOnesWhole) {
  const Ints large(8 * kRingBytes / sizeof(int), 5);
  run(
      [&](Rank& rank) {
        send(rank, large, 1);
        send(rank, {6}, 1);
        send(rank, large, 2);
        send(rank, {7}, 1);
      },
      [&](Rank& rank, Messages& messages) {
        Ints got(large.size());
        int source = -1;
        // Until a part of the next message was read. Each advance() reads a ring's length at most.
        const auto begin_message = [&ring = rank.ranks().ring(0, 1)](Task& task) {
          const std::uint64_t before = ring.read;
          EXPECT_TRUE(test::comes_true([&] {
            EXPECT_FALSE(task.advance());
            return ring.read > before;
          }));
        };
        {
          Task task = messages.recv(0, Rank::span(got), 1, &source);
          begin_message(task);
        }
        expect(messages, 1, {6});
        Ints last(1);
        Task wants_last = messages.recv(0, Rank::span(last), 1, &source);
        begin_message(wants_last);
        {
          Task task = messages.recv(0, Rank::span(got), 2, &source);
          EXPECT_FALSE(task.advance());
        }
        finish(std::move(wants_last));
        EXPECT_EQ(last, Ints{7});
        expect(messages, 2, large);
      });
}

}  // namespace
}  // namespace cohort::comm::shm

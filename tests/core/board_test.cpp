#include "cohort/core/board.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cohort/core/error.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
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

// Counts what a store would be asked.
class CountingBoard : public test::MapBoard {
 public:
  void set(const std::string& key, const std::string& value) override {
    ++requests;
    MapBoard::set(key, value);
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  bool has(const std::string& key) override { return ++requests, MapBoard::has(key); }
  std::string get(const std::string& key) override { return ++requests, MapBoard::get(key); }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return ++requests, MapBoard::add(key, value);
  }
  bool has_all(const std::vector<std::string>& keys) override {
    ++requests;
    return std::ranges::all_of(keys, [this](const std::string& key) { return MapBoard::has(key); });
  }
  bool wait(const std::vector<std::string>& keys, Deadline deadline) override {
    ++requests;
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline.end(), [&] {
      return std::ranges::all_of(keys, [this](const std::string& key) { return MapBoard::has(key); });
    });
  }
  std::vector<std::string> get_all(const std::vector<std::string>& keys) override {
    ++requests;
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(MapBoard::get(key));
    return values;
  }
  void remove(const std::string& key) override {
    ++requests;
    MapBoard::remove(key);
  }
  std::atomic<int> requests{0};

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

// As many ranks as threads, whose last comes late.
void run_ranks(int size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(body, rank);
  for (std::thread& rank : ranks) rank.join();
}

constexpr int kMany = 1024;
const std::chrono::seconds kTime(60);

TEST(BoardTest, AWordOfEachOfManyRanksTakesFourRequestsARank) {
  CountingBoard board;
  constexpr int kRounds = 3;
  std::atomic<int> wrong{0};
  run_ranks(kMany, [&](int rank) {
    for (int round = 0; round < kRounds; ++round) {
      const auto key = [](int number) { return concat("check/", number); };
      const Words words =
          all_gather_words(board, key(round), rank, kMany, concat("of ", rank, ":", round), Deadline(kTime));
      for (int other = 0; other < kMany; ++other) {
        wrong += words.of_rank.at(static_cast<std::size_t>(other)) != concat("of ", other, ":", round);
      }
      if (round >= 2) remove_word(board, key(round - 2), rank);
    }
  });
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_LE(board.requests.load(), 4 * kMany * kRounds);
  EXPECT_EQ(board.num_keys(), 2U * (kMany + 1)) << "those of the last two rounds";
}

TEST(BoardTest, AGateOfManyRanksTakesTwoRequestsARankAndLeavesNothing) {
  CountingBoard board;
  std::atomic<int> inside{0}, early{0};
  run_ranks(kMany, [&](int rank) {
    Gate gate(board, "barrier/0", rank, kMany);
    ++inside;
    gate.arrive();
    EXPECT_TRUE(gate.wait(Deadline(kTime)));
    early += inside.load() != kMany;
  });
  EXPECT_EQ(early.load(), 0);
  EXPECT_LE(board.requests.load(), 2 * kMany + kMany / 50);
  Gate(board, "barrier/0", 0, kMany).remove();
  EXPECT_EQ(board.num_keys(), 0U);
}

TEST(BoardTest, AGateNamesThoseThatAreMissing) {
  constexpr int kSize = 130;
  CountingBoard board;
  std::vector<int> expected;
  for (int rank = 0; rank < kSize; ++rank) {
    if (rank % 61 == 0) {
      expected.push_back(rank);
    } else {
      Gate(board, "made", rank, kSize).arrive();
    }
  }
  Gate gate(board, "made", 1, kSize);
  EXPECT_FALSE(gate.wait(Deadline(milliseconds(20))));
  EXPECT_EQ(gate.missing(), expected);
  Gate(board, "made", 0, kSize).break_open();
  EXPECT_TRUE(gate.wait(Deadline(milliseconds(20))));
}

TEST(BoardTest, EveryRankLearnsWhoseWordIsMissing) {
  CountingBoard board;
  std::barrier start(7);  // threads begin one after the other
  run_ranks(9, [&](int rank) {
    if (rank == 3 || rank == 8) return;
    start.arrive_and_wait();
    const Words words = all_gather_words(board, "here", rank, 9, "word", Deadline(milliseconds(800)));
    EXPECT_EQ(words.missing, (std::vector<int>{3, 8})) << rank;
    EXPECT_TRUE(words.of_rank.empty());
  });
  const Words without_0 = all_gather_words(board, "there", 1, 3, "word", Deadline(milliseconds(10)));
  EXPECT_EQ(without_0.missing, (std::vector<int>{0, 2}));
}

// Its deadline is later than theirs.
TEST(BoardTest, Rank0IsNotMissingWhereItWaitsForOthersItself) {
  CountingBoard board;
  run_ranks(3, [&](int rank) {
    if (rank == 2) return;
    if (rank == 1) test::wait_until([&] { return board.has("here/0"); });
    const milliseconds time(rank == 0 ? 1500 : 100);
    const Deadline waited(time);
    EXPECT_EQ(all_gather_words(board, "here", rank, 3, "word", waited).missing, std::vector<int>{2}) << rank;
    EXPECT_LT(waited.elapsed(), time + test::deadline_slack()) << rank;
  });
}

TEST(BoardTest, Rank0ThatHasComeAndDoesNotGoOnIsMissing) {
  CountingBoard board;
  board.set("here/0", "");
  EXPECT_EQ(all_gather_words(board, "here", 1, 2, "word", Deadline(milliseconds(10))).missing,
            std::vector<int>{0});
}

TEST(BoardTest, WhatIsNoCollectionOfWordsIsAnError) {
  for (const char* text : {"+5:abc", "+x", "+1", "+3:abc3:abc", "+99999999999999999999:a"}) {
    test::MapBoard board;
    board.set("here/all", text);
    EXPECT_THROW(all_gather_words(board, "here", 1, 3, "word", Deadline(milliseconds(10))), CommError)
        << text;
  }
  test::MapBoard board;
  board.set("here/all", "-what,7,-3,2");
  EXPECT_EQ(all_gather_words(board, "here", 1, 3, "word", Deadline(milliseconds(10))).missing,
            std::vector<int>{2});
}

}  // namespace
}  // namespace cohort::core

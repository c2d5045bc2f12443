#include "cohort/base/key_value_store.h"

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

#include "cohort/base/error.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/stores/map_store.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

using std::chrono::milliseconds;

TEST(KeyValueStoreTest, RanksThatHaveNotComeAtTheDeadlineAreReturned) {
  test::MapStore kv_store;
  for (const char* key : {"here/0", "here/2", "there/1"}) kv_store.set(key, "1");
  const Deadline deadline(milliseconds(50));
  EXPECT_EQ(missing_ranks(kv_store, "here", 4, deadline), (std::vector<int>{1, 3}));
  EXPECT_TRUE(deadline.expired());
}

TEST(KeyValueStoreTest, TheWaitEndsWhenTheLastRankHasCome) {
  test::MapStore kv_store;
  kv_store.set("here/0", "1");
  std::thread last([&] {
    std::this_thread::sleep_for(milliseconds(20));
    kv_store.set("here/1", "1");
  });
  const Deadline deadline(std::chrono::seconds(60));
  EXPECT_EQ(missing_ranks(kv_store, "here", 2, deadline), std::vector<int>{});
  EXPECT_LT(deadline.elapsed(), std::chrono::seconds(10));
  last.join();
}

TEST(KeyValueStoreTest, AStoreThatBreaksEndsTheWait) {
  test::MapStore kv_store;
  kv_store.break_it("the store is gone");
  COHORT_EXPECT_THROW_WITH(missing_ranks(kv_store, "here", 2, Deadline::never()), std::runtime_error,
                           "the store is gone");
}

// Counts what a store would be asked.
class CountingStore : public test::MapStore {
 public:
  void set(const std::string& key, const std::string& value) override {
    ++requests;
    MapStore::set(key, value);
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  bool has(const std::string& key) override { return ++requests, MapStore::has(key); }
  std::string get(const std::string& key) override { return ++requests, MapStore::get(key); }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return ++requests, MapStore::add(key, value);
  }
  bool has_all(const std::vector<std::string>& keys) override {
    ++requests;
    return std::ranges::all_of(keys, [this](const std::string& key) { return MapStore::has(key); });
  }
  bool wait(const std::vector<std::string>& keys, Deadline deadline) override {
    ++requests;
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline.end(), [&] {
      return std::ranges::all_of(keys, [this](const std::string& key) { return MapStore::has(key); });
    });
  }
  std::vector<std::string> get_all(const std::vector<std::string>& keys) override {
    ++requests;
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(MapStore::get(key));
    return values;
  }
  void remove(const std::string& key) override {
    ++requests;
    MapStore::remove(key);
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

TEST(KeyValueStoreTest, AWordOfEachOfManyRanksTakesFourRequestsARank) {
  CountingStore kv_store;
  constexpr int kRounds = 3;
  std::atomic<int> wrong{0};
  run_ranks(kMany, [&](int rank) {
    for (int round = 0; round < kRounds; ++round) {
      const auto key = [](int number) { return concat("check/", number); };
      const Words words = all_gather_words(kv_store, key(round), rank, kMany, concat("of ", rank, ":", round),
                                           Deadline(kTime));
      for (int other = 0; other < kMany; ++other) {
        wrong += words.of_rank.at(static_cast<std::size_t>(other)) != concat("of ", other, ":", round);
      }
      if (round >= 2) remove_word(kv_store, key(round - 2), rank);
    }
  });
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_LE(kv_store.requests.load(), 4 * kMany * kRounds);
  EXPECT_EQ(kv_store.num_keys(), 2U * (kMany + 1)) << "those of the last two rounds";
}

TEST(KeyValueStoreTest, ABarrierOfManyRanksTakesTwoRequestsARankAndLeavesNothing) {
  CountingStore kv_store;
  std::atomic<int> inside{0}, early{0};
  run_ranks(kMany, [&](int rank) {
    StoreBarrier barrier(kv_store, "barrier/0", rank, kMany);
    ++inside;
    barrier.arrive();
    EXPECT_TRUE(barrier.wait(Deadline(kTime)));
    early += inside.load() != kMany;
  });
  EXPECT_EQ(early.load(), 0);
  EXPECT_LE(kv_store.requests.load(), 2 * kMany + kMany / 50);
  StoreBarrier(kv_store, "barrier/0", 0, kMany).remove();
  EXPECT_EQ(kv_store.num_keys(), 0U);
}

TEST(KeyValueStoreTest, ABarrierNamesThoseThatAreMissing) {
  constexpr int kSize = 130;
  CountingStore kv_store;
  std::vector<int> expected;
  for (int rank = 0; rank < kSize; ++rank) {
    if (rank % 61 == 0) {
      expected.push_back(rank);
    } else {
      StoreBarrier(kv_store, "made", rank, kSize).arrive();
    }
  }
  StoreBarrier barrier(kv_store, "made", 1, kSize);
  EXPECT_FALSE(barrier.wait(Deadline(milliseconds(20))));
  EXPECT_EQ(barrier.missing(), expected);
  StoreBarrier(kv_store, "made", 0, kSize).release_all();
  EXPECT_TRUE(barrier.wait(Deadline(milliseconds(20))));
}

TEST(KeyValueStoreTest, EveryRankLearnsWhoseWordIsMissing) {
  CountingStore kv_store;
  std::barrier start(7);  // threads begin one after the other
  run_ranks(9, [&](int rank) {
    if (rank == 3 || rank == 8) return;
    start.arrive_and_wait();
    const Words words = all_gather_words(kv_store, "here", rank, 9, "word", Deadline(milliseconds(800)));
    EXPECT_EQ(words.missing, (std::vector<int>{3, 8})) << rank;
    EXPECT_TRUE(words.of_rank.empty());
  });
  const Words without_0 = all_gather_words(kv_store, "there", 1, 3, "word", Deadline(milliseconds(10)));
  EXPECT_EQ(without_0.missing, (std::vector<int>{0, 2}));
}

// Its deadline is later than theirs.
TEST(KeyValueStoreTest, Rank0IsNotMissingWhereItWaitsForOthersItself) {
  CountingStore kv_store;
  run_ranks(3, [&](int rank) {
    if (rank == 2) return;
    if (rank == 1) test::wait_until([&] { return kv_store.has("here/0"); });
    const milliseconds time(rank == 0 ? 1500 : 100);
    const Deadline waited(time);
    EXPECT_EQ(all_gather_words(kv_store, "here", rank, 3, "word", waited).missing, std::vector<int>{2})
        << rank;
    EXPECT_LT(waited.elapsed(), time + test::deadline_slack()) << rank;
  });
}

TEST(KeyValueStoreTest, Rank0ThatHasComeAndDoesNotContinueIsMissing) {
  CountingStore kv_store;
  kv_store.set("here/0", "");
  EXPECT_EQ(all_gather_words(kv_store, "here", 1, 2, "word", Deadline(milliseconds(10))).missing,
            std::vector<int>{0});
}

TEST(KeyValueStoreTest, WhatIsNoCollectionOfWordsIsAnError) {
  for (const char* text : {"+5:abc", "+x", "+1", "+3:abc3:abc", "+99999999999999999999:a"}) {
    test::MapStore kv_store;
    kv_store.set("here/all", text);
    EXPECT_THROW(all_gather_words(kv_store, "here", 1, 3, "word", Deadline(milliseconds(10))), CommError)
        << text;
  }
  test::MapStore kv_store;
  kv_store.set("here/all", "-what,7,-3,2");
  EXPECT_EQ(all_gather_words(kv_store, "here", 1, 3, "word", Deadline(milliseconds(10))).missing,
            std::vector<int>{2});
}

}  // namespace
}  // namespace cohort::base

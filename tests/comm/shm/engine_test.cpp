// What is under way beside other things, and faults; ranks are processes where they must die.
#include "cohort/comm/backends/shm/internal/engine.h"

#include <dirent.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <random>
#include <thread>

#include "cohort/base/error.h"
#include "tests/comm/shm/ranks.h"
#include "tests/support/comes_true.h"
#include "tests/support/deadline_slack.h"
#include "tests/support/processes.h"
#include "tests/support/throws.h"

namespace cohort::comm::shm {
namespace {

TEST(ShmTest, SeveralGroupsAndRanksThatComeWhenTheyLikeDoNotDisturbEachOther) {
  constexpr int kSize = 3, kRounds = 60;
  std::array<MapStore, 3> kv_stores;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<std::unique_ptr<Rank>> groups;
      for (auto& kv_store : kv_stores) groups.push_back(std::make_unique<Rank>(kv_store, rank, kSize));
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int round = 0; round < kRounds; ++round) {
        // All begin in all groups; each rank waits in an order of its own.
        std::array<std::vector<int>, 3> lists;
        std::array<std::shared_ptr<Operation>, 3> begun;
        std::array<std::size_t, 3> order = {0, 1, 2};
        for (std::size_t g = 0; g < 3; ++g) {
          lists[g].assign(static_cast<std::size_t>(round) * (g * g * 500 + 1) + 1, rank + round);
          auto& list = lists[g];
          Rank& group = *groups[g];
          begun[g] = group.begin([&list, &group] {
            return all_reduce(group.ranks(), reinterpret_cast<std::byte*>(list.data()), list.size(),
                              Dtype::kInt32, Op::kSum);
          });
        }
        std::shuffle(order.begin(), order.end(), random);
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
        for (const std::size_t g : order) {
          groups[g]->wait(begun[g]);
          for (const int number : lists[g])
            ASSERT_EQ(number, 3 * round + 3) << "group " << g << ", round " << round;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(ShmTest, WhatNobodyWaitsForIsDoneAndIsToldOnce) {
  run_threads(2, [](Rank& rank) {
    std::vector<float> large(200'000, 1), small(10, 1);
    std::atomic<int> told{0};
    const auto a = rank.begin([&] {
      return all_reduce(rank.ranks(), reinterpret_cast<std::byte*>(large.data()), large.size(), Dtype::kFloat,
                        Op::kSum);
    });
    const auto b = rank.begin([&] {
      return all_reduce(rank.ranks(), reinterpret_cast<std::byte*>(small.data()), small.size(), Dtype::kFloat,
                        Op::kSum);
    });
    std::shared_ptr<Operation> third;
    std::vector<float> later(10, 2);
    rank.engine().when_over(*b, [&] {
      // A callback may begin another, and wait for it.
      third = rank.begin([&] {
        return all_reduce(rank.ranks(), reinterpret_cast<std::byte*>(later.data()), later.size(),
                          Dtype::kFloat, Op::kSum);
      });
      rank.wait(third);
      ++told;
    });
    const base::Deadline deadline(seconds(20));
    while (told.load() == 0) {
      deadline.check("test", "the callback");
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_TRUE(a->over && b->over && third->over);
    EXPECT_EQ(large[199'999], 2);
    EXPECT_EQ(later[9], 4);
    std::this_thread::sleep_for(milliseconds(5));
    EXPECT_EQ(told.load(), 1);
    rank.run([&] { return barrier(rank.ranks()); });  // the other's callback is not cut off
  });
}

TEST(ShmFaultTest, CallsThatDifferAreAnErrorOnEveryRankAndNameBoth) {
  run_threads(2, [](Rank& rank) {
    std::vector<float> list(rank.rank() == 0 ? 10 : 12);
    const char* own_call = rank.rank() == 0 ? "rank 0 all_reduce of 40 bytes float SUM"
                                            : "rank 1 all_reduce of 48 bytes float SUM";
    const char* peer_call = rank.rank() == 1 ? "rank 0 all_reduce of 40 bytes float SUM"
                                             : "rank 1 all_reduce of 48 bytes float SUM";
    const auto call = [&] { rank.sum(list, Dtype::kFloat); };
    COHORT_EXPECT_THROW_WITH(call(), Error, std::string(own_call) + ", " + peer_call);
    COHORT_EXPECT_THROW_WITH(rank.sum(list, Dtype::kFloat), CommError, "the group failed before");
  });
}

std::shared_ptr<Operation> begin_sum(Rank& rank, std::vector<float>& list, milliseconds timeout) {
  return rank.begin(
      [&] {
        return all_reduce(rank.ranks(), reinterpret_cast<std::byte*>(list.data()), list.size(), Dtype::kFloat,
                          Op::kSum);
      },
      "all_reduce", false, timeout);
}

TEST(ShmFaultTest, ADeadlineNamesTheCallAndTheRanksThatAreMissing) {
  std::atomic<int> num_over{0};
  run_threads(4, [&](Rank& rank) {
    if (rank.rank() % 2 != 0) return test::wait_until([&] { return num_over == 2; });
    std::vector<float> list(100, 1);
    const base::Deadline waited(seconds(60));
    const auto begun = begin_sum(rank, list, milliseconds(600));
    COHORT_EXPECT_THROW_WITH(rank.wait(begun), Error, "all_reduce 0 of rank");
    EXPECT_LT(waited.elapsed(), seconds(10));
    ++num_over;
  });
  std::atomic<bool> is_over{false};
  run_threads(2, [&](Rank& rank) {
    if (rank.rank() == 1) return test::wait_until([&] { return is_over.load(); });
    std::vector<float> list(100, 1);
    const auto begun = begin_sum(rank, list, milliseconds(300));
    COHORT_EXPECT_THROW_WITH(rank.wait(begun), TimeoutError, "rank 1 has not come");
    is_over = true;
  });
}

TEST(ShmFaultTest, AWaitThatEndsSoonerThanTheCallDoesNotEndTheCall) {
  std::atomic<bool> has_ended{false};
  run_threads(2, [&](Rank& rank) {
    std::vector<float> list(100'000, 1);
    if (rank.rank() == 1) test::wait_until([&] { return has_ended.load(); });
    const auto begun = begin_sum(rank, list, seconds(20));
    if (rank.rank() == 0) {
      COHORT_EXPECT_THROW_WITH(rank.engine().wait(*begun, base::Deadline(milliseconds(50))), TimeoutError,
                               "is not over after");
      has_ended = true;
    }
    rank.wait(begun);
    EXPECT_EQ(list[99'999], 2);
  });
}

/// Holds from the moment in which somebody asks who is missing, as if the last rank came then.
class ComesAsItIsAskedFor : public Condition {
 public:
  explicit ComesAsItIsAskedFor(std::atomic<bool>& has_come) : has_come_(has_come) {}
  bool ready() override { return has_come_; }
  std::uint64_t waits_for() const override {
    has_come_ = true;
    return 1;
  }

 private:
  std::atomic<bool>& has_come_;
};

Task wait_for(std::atomic<bool>& has_come) {
  co_await ComesAsItIsAskedFor(has_come);
}

TEST(ShmFaultTest, WhatIsThereAtTheLastLookIsNotLate) {
  run_threads(1, [](Rank& rank) {
    std::atomic<bool> has_come{false};
    const auto operation = std::make_shared<Operation>(base::Deadline(milliseconds(0)));
    operation->call = "call";
    operation->make = [&] { return wait_for(has_come); };
    rank.engine().begin(operation);
    EXPECT_NO_THROW(rank.wait(operation));
  });
}

TEST(ShmFaultTest, AWaitLooksOnceMoreAtItsDeadline) {
  run_threads(1, [](Rank& rank) {
    std::atomic<bool> has_come{false};
    const auto operation = std::make_shared<Operation>(base::Deadline(seconds(20)));
    operation->call = "call";
    operation->make = [&] { return wait_for(has_come); };
    operation->rounds = Rounds::kOne;  // nobody but who waits continues with it
    rank.engine().begin(operation);
    has_come = true;
    EXPECT_NO_THROW(rank.engine().wait(*operation, base::Deadline(milliseconds(0))));
    rank.wait(operation);
  });
}

TEST(ShmFaultTest, ARankThatLeavesIsNamedAtOnce) {
  run_threads(2, [](Rank& rank) {
    std::vector<float> list(10);
    rank.sum(list, Dtype::kFloat);
    if (rank.rank() == 1) return;
    const base::Deadline waited(seconds(60));
    COHORT_EXPECT_THROW_WITH(rank.sum(list, Dtype::kFloat), PeerError, "rank 1 has left the group");
    EXPECT_LT(waited.elapsed(), seconds(10));
  });
}

TEST(ShmFaultTest, WhatIsUnderWayWhenAGroupIsAbortedOrClosesFails) {
  MapStore kv_store;
  std::vector<float> list(100'000);
  std::atomic<bool> over{false};
  std::thread other([&] {
    const Rank rank(kv_store, 1, 2);
    while (!over.load()) std::this_thread::sleep_for(milliseconds(1));
  });
  const auto begin = [&list](Rank& rank) {
    return rank.begin([&] {
      return all_reduce(rank.ranks(), reinterpret_cast<std::byte*>(list.data()), list.size(), Dtype::kFloat,
                        Op::kSum);
    });
  };
  {
    Rank rank(kv_store, 0, 2);
    const auto begun = begin(rank);
    rank.engine().cancel("it was aborted");
    COHORT_EXPECT_THROW_WITH(rank.wait(begun), CommError, "it was aborted");
  }
  over.store(true);
  other.join();
  MapStore again;
  over.store(false);
  other = std::thread([&] {
    const Rank rank(again, 1, 2);
    while (!over.load()) std::this_thread::sleep_for(milliseconds(1));
  });
  std::shared_ptr<Operation> left;
  {
    Rank rank(again, 0, 2);
    left = begin(rank);
  }
  ASSERT_TRUE(left->over);
  COHORT_EXPECT_THROW_WITH(std::rethrow_exception(left->error), CommError, "closed before it was over");
  over.store(true);
  other.join();
}

TEST(ShmFaultTest, ACancelIsHeardByWhoWaitsAndByOthersThatCancel) {
  for (int round = 0; round < 20; ++round) {
    run_threads(2, [&](Rank& rank) {
      if (rank.rank() == 1) {
        COHORT_EXPECT_THROW_WITH(rank.run([&] { return barrier(rank.ranks()); }), PeerError,
                                 "it was aborted");
        return;
      }
      std::vector<int> list(100);
      std::array<int, 3> sources{};
      std::vector<std::shared_ptr<Operation>> begun;
      for (int& source : sources) begun.push_back(rank.recv(1, list, 0, &source));
      std::vector<std::thread> threads;
      for (const auto& operation : begun) {
        threads.emplace_back(
            [&] { COHORT_EXPECT_THROW_WITH(rank.wait(operation), CommError, "it was aborted"); });
      }
      std::this_thread::sleep_for(milliseconds(round % 4));
      const base::Deadline waited(seconds(60));
      for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&] { rank.engine().cancel("it was aborted"); });
      }
      for (std::thread& thread : threads) thread.join();
      EXPECT_LT(waited.elapsed(), seconds(10));
    });
  }
}

TEST(ShmFaultTest, RanksThatDoNotComeAreNamedWhenTheGroupIsMade) {
  MapStore kv_store;
  COHORT_EXPECT_THROW_WITH(Rank(kv_store, 0, 2, milliseconds(100)), RendezvousError,
                           "rank 1 of 2 did not come");
}

TEST(ShmFaultTest, AnotherHostIsRejectedByName) {
  MapStore kv_store;
  kv_store.set("contact/1", "other-boot/net:[1] node7 00001 token");
  COHORT_EXPECT_THROW_WITH(Rank(kv_store, 0, 2, seconds(5)), UsageError, "rank 1 on node7");
}

// Ranks as processes: a folder is their key-value store.
class FolderStore : public KeyValueStore {
 public:
  explicit FolderStore(std::filesystem::path folder) : folder_(std::move(folder)) {}
  void set(const std::string& key, const std::string& value) override {
    const auto path = path_of(key);
    test::write_file(path.string() + ".new", value);
    std::filesystem::rename(path.string() + ".new", path);
  }
  bool has(const std::string& key) override { return std::filesystem::exists(path_of(key)); }
  std::string get(const std::string& key) override { return test::read_file(path_of(key)); }
  std::int64_t add(const std::string&, std::int64_t) override { throw std::logic_error("nobody counts"); }

 private:
  std::filesystem::path path_of(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '-');
    return folder_ / key;
  }
  std::filesystem::path folder_;
};

// Sums until a rank is killed; then says what it threw, and how long after the last sum.
TEST(ShmRankChild, DISABLED_SumsUntilSomethingHappens) {
  FolderStore kv_store(std::getenv("TEST_FOLDER"));
  const milliseconds timeout(std::stol(std::getenv("TEST_TIMEOUT_MS")));
  Rank rank(kv_store, std::stoi(std::getenv("RANK")), std::stoi(std::getenv("WORLD_SIZE")), seconds(60));
  std::vector<float> list(100'000, 1);
  const auto make = [&] {
    return all_reduce(rank.ranks(), reinterpret_cast<std::byte*>(list.data()), list.size(), Dtype::kFloat,
                      Op::kMax);
  };
  auto last = std::chrono::steady_clock::now();
  try {
    for (int round = 0;; ++round) {
      rank.wait(rank.begin(make, "all_reduce", false, timeout));
      last = std::chrono::steady_clock::now();
      if (round == 20) std::puts("twenty rounds"), std::fflush(stdout);
    }
  } catch (const Error& error) {
    const auto waited = std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - last);
    std::printf("after %ld ms: %s\n", static_cast<long>(waited.count()), error.what());
  }
}

int open_descriptors() {
  int count = 0;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

long waited_ms(const std::string& output) {
  const auto at = output.find("after ");
  return at == std::string::npos ? -1 : std::stol(output.substr(at + 6));
}

TEST(ShmFaultTest, AProcessThatIsKilledIsNamedWithinASecond) {
  test::RankProcesses ranks("ShmRankChild", 3, {{"TEST_TIMEOUT_MS", "60000"}});
  for (int rank = 0; rank < 3; ++rank) ranks.wait_for(rank, "twenty rounds");
  ranks.send(1, SIGKILL);
  ranks.wait();
  for (const int rank : {0, 2}) {
    const std::string output = ranks.output(rank);
    EXPECT_NE(output.find("rank 1 died (process "), std::string::npos) << output;
    EXPECT_GE(waited_ms(output), 0) << output;
    EXPECT_LT(waited_ms(output), 1000) << output;
  }
}

TEST(ShmFaultTest, AProcessThatIsStoppedIsNamedAtTheDeadline) {
  test::RankProcesses ranks("ShmRankChild", 2, {{"TEST_TIMEOUT_MS", "1500"}});
  for (int rank = 0; rank < 2; ++rank) ranks.wait_for(rank, "twenty rounds");
  ranks.send(1, SIGSTOP);
  ranks.wait_for(0, "rank 1 has not come");
  const long waited = waited_ms(ranks.output(0));
  EXPECT_GE(waited, 1400);
  EXPECT_LT(waited, (milliseconds(2000) + test::deadline_slack()).count()) << "1500, and 500 for its writes";
}

TEST(ShmFaultTest, GroupsThatComeAndGoLeaveNothingOpen) {
  run_threads(2, [](Rank&) {});
  const int before = open_descriptors();
  for (int round = 0; round < 20; ++round) {
    run_threads(3, [](Rank& rank) {
      std::vector<float> list(100'000, 1);
      rank.sum(list, Dtype::kFloat);
    });
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(ShmFaultTest, ASecondGroupOfTheSameRanksTakesOnlyConnections) {
  constexpr int kRanks = 4;
  MapStore first_store, second_store;
  std::vector<std::unique_ptr<Rank>> ranks(2 * kRanks);
  const auto make_all = [&](MapStore& kv_store, std::size_t first) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        ranks[first + static_cast<std::size_t>(rank)] = std::make_unique<Rank>(kv_store, rank, kRanks);
      });
    }
    for (std::thread& thread : threads) thread.join();
  };
  make_all(first_store, 0);
  const int before = open_descriptors();
  make_all(second_store, kRanks);
  EXPECT_EQ(open_descriptors() - before, kRanks * (kRanks - 1) + 1)
      << "both ends of each, and rank 0's memory";
}

}  // namespace
}  // namespace cohort::comm::shm

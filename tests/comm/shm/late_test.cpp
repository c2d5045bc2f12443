// Ranks that come late, or see the others only in part: what they may write to, how long the others wait.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <random>
#include <span>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "cohort/base/error.h"
#include "cohort/comm/backends/shm/internal/arena.h"
#include "tests/comm/shm/ranks.h"
#include "tests/support/comes_true.h"
#include "tests/support/throws.h"

namespace cohort::comm::shm {
namespace {

using test::wait_until;

constexpr std::size_t kNumbers = 16 * 1024;  // 64 KiB: reduced in place where it is shared

// Numbers in an arena.
class Shared {
 public:
  Shared() { std::ranges::fill(numbers(), 1.0F); }
  ~Shared() { arena_free(data_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  std::span<float> numbers() { return {static_cast<float*>(data_), kNumbers}; }
  bool are_all(float value) {
    return std::ranges::all_of(numbers(), [=](float number) { return number == value; });
  }

 private:
  void* data_ = arena_allocate(kNumbers * sizeof(float));
};

std::function<Task()> sum_of(Rank& rank, std::span<float> numbers) {
  return [&rank, numbers] {
    return all_reduce(rank.ranks(), reinterpret_cast<std::byte*>(numbers.data()), numbers.size(),
                      Dtype::kFloat, Op::kSum);
  };
}

// Where one round is enough, the rest is left to wait().
std::shared_ptr<Operation> begin_all_reduce(Rank& rank, std::function<Task()> make, std::size_t bytes,
                                            milliseconds timeout) {
  auto operation = std::make_shared<Operation>(base::Deadline(timeout));
  operation->call = "all_reduce";
  operation->make = std::move(make);
  operation->rounds = rounds_of(rank.ranks(), CollectiveType::kAllReduce, bytes);
  rank.engine().begin(operation);
  return operation;
}

TEST(ShmLateTest, ALateRankWritesNothingToWhatAnotherGotBack) {
  for (const int num_ranks : {2, 3}) {
    std::atomic<int> gave_up{0};
    run_threads(num_ranks, [&](Rank& rank) {
      Shared list;
      rank.run(sum_of(rank, list.numbers()));  // from here on memory is shared
      std::ranges::fill(list.numbers(), 1.0F);
      rank.run(sum_of(rank, list.numbers()));
      ASSERT_TRUE(list.are_all(static_cast<float>(num_ranks)));
      if (rank.rank() == num_ranks - 1) {
        wait_until([&] { return gave_up.load() >= num_ranks - 1; });
        EXPECT_ANY_THROW(rank.run(sum_of(rank, list.numbers())));
        gave_up.fetch_add(1);
        return;
      }
      const auto begun = rank.begin(sum_of(rank, list.numbers()), "all_reduce", false, milliseconds(200));
      EXPECT_ANY_THROW(rank.wait(begun));
      std::ranges::fill(list.numbers(), 7.0F);
      gave_up.fetch_add(1);
      wait_until([&] { return gave_up.load() >= num_ranks; });
      EXPECT_TRUE(list.are_all(7.0F)) << "rank " << rank.rank();
    });
  }
}

// Whatever the moment in which one gives up.
TEST(ShmLateTest, WhatARankGotBackStaysItsOwn) {
  for (int round = 0; round < 30; ++round) {
    run_threads(2, [&](Rank& rank) {
      Shared list;
      rank.run(sum_of(rank, list.numbers()));
      std::ranges::fill(list.numbers(), 1.0F);
      if (rank.rank() == 1) std::this_thread::sleep_for(std::chrono::microseconds(37 * round));
      const auto begun = rank.begin(sum_of(rank, list.numbers()));
      if (rank.rank() == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(500));
        rank.engine().cancel("it was aborted");
      }
      try {
        rank.wait(begun);
      } catch (const Error&) {
        std::ranges::fill(list.numbers(), 7.0F);
        std::this_thread::sleep_for(milliseconds(3));
        EXPECT_TRUE(list.are_all(7.0F)) << "rank " << rank.rank() << ", round " << round;
      }
    });
  }
}

// An all-reduce in place of which a test says how long the copy takes: `write` gets rank 0's numbers.
Task slow_sum(Rank& rank, std::span<float> numbers, std::function<void(float*)> write) {
  Communicator& ranks = rank.ranks();
  const Signature signature{.type = CollectiveType::kAllReduce,
                            .dtype = Dtype::kFloat,
                            .op = Op::kSum,
                            .bytes = numbers.size_bytes()};
  ranks.arrive(signature, ranks.place_of(numbers.data(), numbers.size_bytes()));
  co_await ranks.everyone();
  float* const of_rank_0 = reinterpret_cast<float*>(ranks.find(0, ranks.word(0)));
  ranks.begin_writes();
  write(of_rank_0);
  ranks.arrive(signature);
  co_await ranks.everyone();
}

std::shared_ptr<Operation> begin_kept(Rank& rank, std::function<Task()> make, milliseconds timeout,
                                      std::weak_ptr<int>& kept) {
  auto operation = std::make_shared<Operation>(base::Deadline(timeout));
  auto memory = std::make_shared<int>(0);
  kept = memory;
  operation->call = "all_reduce";
  operation->make = std::move(make);
  operation->keep = std::move(memory);
  rank.engine().begin(operation);
  return operation;
}

// Rank 0 has reduced its part and arrived at the next round while the other still writes to its memory.
TEST(ShmLateTest, AnErrorComesWhenAPeersWriteIsOver) {
  std::atomic<bool> is_written{false};
  run_threads(2, [&](Rank& rank) {
    Shared list;
    for (int i = 0; i < 2; ++i) rank.run(sum_of(rank, list.numbers()));
    if (rank.rank() == 1) {
      rank.run([&] {  // rank 0 has arrived, so this one is over without an error
        return slow_sum(rank, list.numbers(), [&](float* numbers) {
          wait_until([&] { return rank.ranks().did_any_give_up(); });
          std::this_thread::sleep_for(milliseconds(50));  // rank 0 would be back by now
          std::fill_n(numbers, kNumbers, 3.0F);
        });
      });
      is_written = true;
      return;
    }
    std::weak_ptr<int> kept;
    const auto begun = begin_kept(rank, sum_of(rank, list.numbers()), milliseconds(1000), kept);
    COHORT_EXPECT_THROW_WITH(rank.wait(begun), TimeoutError, "rank 1 has not come");
    EXPECT_TRUE(kept.expired()) << "nobody writes there any more";
    std::ranges::fill(list.numbers(), 7.0F);
    wait_until([&] { return is_written.load(); });
    EXPECT_TRUE(list.are_all(7.0F));
  });
}

TEST(ShmLateTest, MemoryThatAPeerHangsInIsKept) {
  std::atomic<bool> is_over{false};
  run_threads(2, [&](Rank& rank) {
    Shared list;
    for (int i = 0; i < 2; ++i) rank.run(sum_of(rank, list.numbers()));
    if (rank.rank() == 1) {
      return rank.run([&] {
        return slow_sum(rank, list.numbers(), [&](float*) { wait_until([&] { return is_over.load(); }); });
      });
    }
    std::weak_ptr<int> kept;
    const auto begun = begin_kept(rank, sum_of(rank, list.numbers()), milliseconds(1000), kept);
    const base::Deadline waited(seconds(60));
    testing::internal::CaptureStderr();
    EXPECT_THROW(rank.wait(begun), TimeoutError);
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_NE(log.find("their memory is not used again"), std::string::npos) << log;
    EXPECT_LT(waited.elapsed(), seconds(10));
    EXPECT_FALSE(kept.expired());
    is_over = true;
  });
}

// Rank 2 fails while rank 1 copies and rank 0 waits for both.
TEST(ShmLateTest, AnErrorOfAThirdRankComesWhenAPeersWriteIsOver) {
  std::atomic<bool> is_writing{false}, is_written{false};
  run_threads(3, [&](Rank& rank) {
    Shared list;
    for (int i = 0; i < 2; ++i) rank.run(sum_of(rank, list.numbers()));
    if (rank.rank() == 1) {
      EXPECT_ANY_THROW(rank.run([&] {
        return slow_sum(rank, list.numbers(), [&](float* numbers) {
          is_writing = true;
          wait_until([&] {
            const auto gone = rank.ranks().why_gone(0);
            return gone && gone->rank == 0;  // rank 2 gave up first
          });
          std::this_thread::sleep_for(milliseconds(50));  // rank 0 would be back by now
          std::fill_n(numbers, kNumbers, 3.0F);
        });
      }));
      is_written = true;
    } else if (rank.rank() == 2) {
      EXPECT_ANY_THROW(rank.run([&] {
        return slow_sum(rank, list.numbers(), [&](float*) {
          wait_until([&] { return is_writing.load(); });
          throw std::runtime_error("rank 2 fails");
        });
      }));
    } else {
      EXPECT_THROW(rank.run(sum_of(rank, list.numbers())), PeerError);
      std::ranges::fill(list.numbers(), 7.0F);
      wait_until([&] { return is_written.load(); });
      EXPECT_TRUE(list.are_all(7.0F));
    }
  });
}

Task arrive_and_fail(Rank& rank, std::span<float> numbers, std::function<void()> before) {
  const Signature signature{.type = CollectiveType::kAllReduce,
                            .dtype = Dtype::kFloat,
                            .op = Op::kSum,
                            .bytes = numbers.size_bytes()};
  rank.ranks().arrive(signature, rank.ranks().place_of(numbers.data(), numbers.size_bytes()));
  before();
  throw std::runtime_error("rank 2 fails");
  co_return;
}

// Rank 1 says that it writes, sees that rank 0 has given up, and writes nothing.
TEST(ShmLateTest, WhoWroteNothingHoldsUpNobody) {
  std::atomic<bool> has_rank_0_failed{false}, has_rank_1_failed{false}, has_rank_2_come{false},
      is_over{false};
  run_threads(3, [&](Rank& rank) {
    Shared list;
    for (int i = 0; i < 2; ++i) rank.run(sum_of(rank, list.numbers()));
    if (rank.rank() == 0) {
      const auto begun = rank.begin(sum_of(rank, list.numbers()), "all_reduce", false, milliseconds(100));
      EXPECT_ANY_THROW(rank.wait(begun));
      has_rank_0_failed = true;
    } else if (rank.rank() == 1) {
      wait_until([&] { return has_rank_2_come.load(); });
      EXPECT_ANY_THROW(rank.run(sum_of(rank, list.numbers())));
      has_rank_1_failed = true;
      wait_until([&] { return is_over.load(); });
    } else {
      wait_until([&] { return has_rank_0_failed.load(); });
      std::weak_ptr<int> kept;
      const auto call = [&] {
        return arrive_and_fail(rank, list.numbers(), [&] {
          has_rank_2_come = true;
          wait_until([&] { return has_rank_1_failed.load(); });
        });
      };
      EXPECT_ANY_THROW(rank.wait(begin_kept(rank, call, seconds(20), kept)));
      EXPECT_TRUE(kept.expired()) << "who is held up keeps it";
      is_over = true;
    }
  });
}

TEST(ShmLateTest, ADeadlineAfterAnotherCallHolds) {
  std::atomic<bool> is_over{false};
  run_threads(2, [&](Rank& rank) {
    std::vector<float> first(100, 1), second(100, 1);
    if (rank.rank() == 1) return wait_until([&] { return is_over.load(); });
    const auto a = rank.begin(sum_of(rank, first), "all_reduce", false, seconds(15));
    const auto b = rank.begin(sum_of(rank, second), "all_reduce", false, milliseconds(200));
    const base::Deadline waited(seconds(60));
    COHORT_EXPECT_THROW_WITH(rank.wait(b), TimeoutError,
                             "it comes after all_reduce 0 of rank 0/2, for which rank 1 has not come");
    EXPECT_LT(waited.elapsed(), seconds(10));
    EXPECT_THROW(rank.wait(a), TimeoutError);
    is_over = true;
  });
}

// A loaded machine stops a thread for this long in some iterations; a sleep of ours would come in each.
constexpr int kRounds = 6;
constexpr milliseconds kLessThanANap(90);
constexpr milliseconds kToRest(20);  // for the progress threads, which would do what others wait for

// A second round is needed as soon as one of the ranks has its numbers in shared memory.
TEST(ShmLateTest, WhoWaitsLaterHoldsUpNobodyThatSharesItsMemory) {
  std::atomic<int> begun{0};  // rounds, by rank 0: who begins last has done its part
  run_threads(2, [&](Rank& rank) {
    Shared shared;
    std::vector<float> own(kNumbers, 1);
    const std::span<float> numbers = rank.rank() == 1 ? shared.numbers() : std::span<float>(own);
    auto fastest = base::Deadline::Clock::duration::max();
    for (int i = 0; i < kRounds; ++i) {
      std::this_thread::sleep_for(kToRest);
      if (rank.rank() == 1) wait_until([&] { return begun > i; });
      const auto operation = begin_all_reduce(rank, sum_of(rank, numbers), numbers.size_bytes(), seconds(15));
      if (rank.rank() == 0) ++begun;
      EXPECT_EQ(operation->rounds, Rounds::kOne);
      const base::Deadline waited(seconds(60));
      if (rank.rank() == 0) std::this_thread::sleep_for(milliseconds(200));
      rank.wait(operation);
      fastest = std::min(fastest, waited.elapsed());
      rank.run([&] { return barrier(rank.ranks()); });
    }
    if (rank.rank() == 1) {
      EXPECT_LT(fastest, kLessThanANap);
    }
  });
}

/// The first round of two, whose end this rank sees at its last look before it sleeps.
class EndsAsItSleeps : public Condition {
 public:
  explicit EndsAsItSleeps(Communicator& ranks) : ranks_(ranks), all_(ranks.everyone()) {}
  bool ready() override { return ranks_.is_asleep() && all_.ready(); }
  std::uint64_t waits_for() const override { return all_.waits_for(); }

 private:
  Communicator& ranks_;
  Communicator::Everyone all_;
};

constexpr std::size_t kTwoRoundsBytes = 32768;

Task two_rounds(Communicator& ranks, bool ends_as_it_sleeps) {
  const Signature signature{
      .type = CollectiveType::kAllReduce, .dtype = Dtype::kFloat, .op = Op::kSum, .bytes = kTwoRoundsBytes};
  ranks.arrive(signature);
  if (ends_as_it_sleeps) {
    co_await EndsAsItSleeps(ranks);
  } else {
    co_await ranks.everyone();
  }
  ranks.arrive(signature);
  co_await ranks.everyone_again();
}

TEST(ShmLateTest, NobodySleepsInTheSecondRoundWithoutHavingAsked) {
  std::atomic<int> begun{0};  // rounds, by rank 1
  run_threads(2, [&](Rank& rank) {
    rank.run([&] { return barrier(rank.ranks()); });
    auto fastest = base::Deadline::Clock::duration::max();
    for (int i = 0; i < kRounds; ++i) {
      std::this_thread::sleep_for(kToRest);
      if (rank.rank() == 0) wait_until([&] { return begun > i; });
      const auto operation = begin_all_reduce(
          rank, [&] { return two_rounds(rank.ranks(), rank.rank() == 0); }, kTwoRoundsBytes, seconds(20));
      EXPECT_EQ(operation->rounds, Rounds::kOne);
      if (rank.rank() == 1) {
        ++begun;
        std::this_thread::sleep_for(milliseconds(200));
      }
      const base::Deadline waited(seconds(60));
      rank.wait(operation);
      fastest = std::min(fastest, waited.elapsed());
      rank.run([&] { return barrier(rank.ranks()); });
    }
    if (rank.rank() == 0) {
      EXPECT_LT(fastest, kLessThanANap);
    }
  });
}

// All have begun in time, and then compute for longer than the deadline: rank 0 waits first, and has the
// other continue, which takes some time, before it calls it late. A loaded machine may stop a thread for
// longer than rank 1 gets, so not each round must be good.
TEST(ShmLateTest, WhoHasBegunInTimeIsNotLate) {
  const auto slow = [](float*) { std::this_thread::sleep_for(milliseconds(20)); };
  for (const int more : {0, 5, 40}) {
    int good = 0;
    for (int round = 0; round < 20 && good < 5; ++round) {
      std::atomic<bool> has_begun{false};
      std::atomic<int> over{0};
      run_threads(2, [&](Rank& rank) {
        Shared shared;
        const std::span<float> numbers = shared.numbers();
        rank.run(sum_of(rank, numbers));
        const auto slow_part = [&] { return slow_sum(rank, numbers, slow); };
        const std::function<Task()> make = rank.rank() == 0 ? sum_of(rank, numbers) : slow_part;
        std::this_thread::sleep_for(kToRest);
        if (rank.rank() == 0) wait_until([&] { return has_begun.load(); });
        const auto operation = begin_all_reduce(rank, make, numbers.size_bytes(), milliseconds(100));
        has_begun = true;
        const base::Deadline computes(milliseconds(130 + (rank.rank() == 1 ? more : 0)));
        for (volatile unsigned work = 0; !computes.expired();) work = work + 1;
        try {
          rank.wait(operation);
          ++over;
        } catch (const Error&) {
        }
      });
      good += over == 2 ? 1 : 0;
    }
    EXPECT_EQ(good, 5) << more;
  }
}

// A call is begun, and then waited for, asked after again and again, or left until later calls are over; in
// memory that all, some or none of the ranks share.
TEST(ShmLateTest, RanksMayWaitAskOrComeLaterInAnyOrder) {
  for (const int num_ranks : {2, 3}) {
    run_threads(num_ranks, [](Rank& rank) {
      std::mt19937 common(7), own(rank.rank());
      const auto draw = [](std::mt19937& random, unsigned n) { return static_cast<unsigned>(random() % n); };
      struct Begun {
        std::shared_ptr<Operation> operation;
        std::unique_ptr<Shared> shared;
        std::vector<float> list;
        std::span<float> numbers;
      };
      std::vector<Begun> later;
      const auto check = [&](const Begun& begun) {
        EXPECT_TRUE(std::ranges::all_of(
            begun.numbers, [&](float number) { return number == static_cast<float>(rank.size()); }));
      };
      for (int call = 0; call < 200; ++call) {
        const std::size_t numel = 256U << draw(common, 7);  // 1 to 64 KiB
        Begun begun;
        if (draw(common, 4) < 3 || draw(own, 2) == 0) {
          begun.shared = std::make_unique<Shared>();
          begun.numbers = begun.shared->numbers().first(numel);
        } else {
          begun.list.assign(numel, 1);
          begun.numbers = begun.list;
        }
        begun.operation =
            begin_all_reduce(rank, sum_of(rank, begun.numbers), begun.numbers.size_bytes(), seconds(20));
        if (draw(own, 8) == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw(own, 2000)));
        const unsigned how = draw(own, 4);
        if (how == 3) {
          later.push_back(std::move(begun));
          continue;
        }
        if (how == 2) wait_until([&] { return rank.engine().test(*begun.operation); });
        rank.wait(begun.operation);
        check(begun);
        for (const Begun& each : later) {
          EXPECT_TRUE(rank.engine().test(*each.operation));  // calls end in order
          check(each);
        }
        later.clear();
      }
      for (const Begun& each : later) rank.wait(each.operation);
      rank.run([&] { return barrier(rank.ranks()); });
    });
  }
}

#if defined(__x86_64__)
// As at::globalContext().setFlushDenormal() sets it, for the thread that calls it.
TEST(ShmLateTest, AllRanksHaveTheSameBitsWhicheverThreadSums) {
  constexpr float kSmall = std::numeric_limits<float>::denorm_min() * 5;
  run_threads(2, [&](Rank& rank) {
    std::vector<float> list(50'000, kSmall), small(10, kSmall);
    const unsigned before = _mm_getcsr();
    if (rank.rank() == 0) _mm_setcsr(before | 0x8040U);
    rank.sum(list, Dtype::kFloat);
    rank.sum(small, Dtype::kFloat);
    _mm_setcsr(before);
    EXPECT_TRUE(std::ranges::all_of(list, [=](float number) { return number == 2 * kSmall; }));
    EXPECT_EQ(small[9], 2 * kSmall);
  });
}
#endif

TEST(ShmLateTest, ACallbackMayLetGoOfTheEngineLast) {
  MapStore kv_store;
  std::thread other([&] {
    Rank rank(kv_store, 1, 2);
    std::this_thread::sleep_for(milliseconds(50));
    rank.run([&] { return barrier(rank.ranks()); });
  });
  const auto told = std::make_shared<std::atomic<bool>>(false);
  std::weak_ptr<Engine> gone;
  {
    auto engine = Engine::make(std::make_unique<Communicator>(kv_store, 0, 2, base::Deadline(seconds(20))));
    gone = engine;
    auto operation = std::make_shared<Operation>(base::Deadline(seconds(20)));
    operation->call = "barrier";
    operation->make = [&ranks = engine->ranks()] { return barrier(ranks); };
    engine->begin(operation);
    engine->when_over(*operation, [engine, told] { told->store(true); });
  }
  other.join();
  const base::Deadline deadline(seconds(20));
  while (!told->load() || !gone.expired()) {
    deadline.check("test", "the engine to go");
    std::this_thread::sleep_for(milliseconds(1));
  }
}

}  // namespace
}  // namespace cohort::comm::shm

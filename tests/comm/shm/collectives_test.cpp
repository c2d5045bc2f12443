#include "cohort/comm/backends/shm/internal/collectives.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/comm/backends/shm/internal/arena.h"
#include "tests/comm/shm/ranks.h"
#include "tests/support/throws.h"

namespace cohort::comm::shm {
namespace {

float value(int rank, std::size_t i) {
  return std::sin(static_cast<float>(i) * 0.37F + static_cast<float>(rank));
}

// In the order of the ranks, as every path must.
std::vector<float> sum_of_all(int size, std::size_t n) {
  std::vector<float> sum(n);
  for (std::size_t i = 0; i < n; ++i) {
    sum[i] = value(0, i);
    for (int rank = 1; rank < size; ++rank) sum[i] += value(rank, i);
  }
  return sum;
}

const std::vector<std::size_t> kSizes = {0, 1, 7, 1000, 5000, 40'000, 100'003, 300'000};

TEST(ShmTest, SumsOfEverySizeGoInTheOrderOfTheRanks) {
  for (const int size : {1, 2, 3, 4, 5}) {
    run_threads(size, [&](Rank& rank) {
      for (const std::size_t n : kSizes) {
        std::vector<float> numbers(n);
        for (std::size_t i = 0; i < n; ++i) numbers[i] = value(rank.rank(), i);
        rank.sum(numbers, Dtype::kFloat);
        ASSERT_EQ(numbers, sum_of_all(size, n)) << n << " numbers, " << size << " ranks";
      }
    });
  }
}

TEST(ShmTest, MemoryOfArenasIsReducedInPlaceAlsoWhenOnlySomeRanksHaveIt) {
  for (const int size : {2, 3, 4}) {
    for (const int without : {-1, 0, size - 1}) {  // a rank whose memory is its own
      run_threads(size, [&](Rank& rank) {
        for (const std::size_t n : kSizes) {
          if (n == 0) continue;
          std::vector<float> own(n);
          auto* const shared = static_cast<float*>(arena_allocate(n * sizeof(float)));
          float* const data = rank.rank() == without ? own.data() : shared;
          for (std::size_t i = 0; i < n; ++i) data[i] = value(rank.rank(), i);
          rank.sum(data, n, Dtype::kFloat);
          ASSERT_EQ(std::vector<float>(data, data + n), sum_of_all(size, n))
              << n << " numbers, " << size << " ranks";
          arena_free(shared);
        }
      });
    }
  }
}

TEST(ShmTest, EveryCollectiveMovesPartsLargerThanASlot) {
  constexpr std::size_t kNumbers = 100'003;
  for (const int size : {1, 2, 3}) {
    run_threads(size, [&](Rank& rank) {
      const auto n = static_cast<std::size_t>(size);
      const int root = size - 1;
      const auto of = [](int who, std::size_t i) { return who * 1'000'000 + static_cast<int>(i); };
      std::vector<int> own_numbers(kNumbers);
      for (std::size_t i = 0; i < kNumbers; ++i) own_numbers[i] = of(rank.rank(), i);
      const auto pointers = [&](std::vector<std::vector<int>>& lists) {
        std::vector<std::byte*> list;
        for (auto& numbers : lists) list.push_back(reinterpret_cast<std::byte*>(numbers.data()));
        return list;
      };
      const auto expect_of = [&](const std::vector<int>& got, int who, const char* call) {
        for (std::size_t i = 0; i < kNumbers; i += 101) ASSERT_EQ(got[i], of(who, i)) << call;
        ASSERT_EQ(got.back(), of(who, kNumbers - 1)) << call;
      };

      std::vector<int> sent = own_numbers;
      rank.run([&] { return broadcast(rank.ranks(), Rank::span(sent), root); });
      expect_of(sent, root, "broadcast");

      std::vector<std::vector<int>> all(n, std::vector<int>(kNumbers));
      rank.run([&] { return all_gather(rank.ranks(), pointers(all), Rank::span(own_numbers)); });
      for (int who = 0; who < size; ++who) expect_of(all[static_cast<std::size_t>(who)], who, "all_gather");

      for (auto& numbers : all) numbers.assign(kNumbers, -1);
      rank.run([&] {
        return gather(rank.ranks(), rank.rank() == root ? pointers(all) : std::vector<std::byte*>(),
                      Rank::span(own_numbers), root);
      });
      if (rank.rank() == root) {
        for (int who = 0; who < size; ++who) expect_of(all[static_cast<std::size_t>(who)], who, "gather");
      }

      for (int who = 0; who < size; ++who) {
        for (std::size_t i = 0; i < kNumbers; ++i) all[static_cast<std::size_t>(who)][i] = of(who, i);
      }
      std::vector<int> got(kNumbers, -1);
      rank.run([&] {
        return scatter(rank.ranks(), Rank::span(got),
                       rank.rank() == root ? pointers(all) : std::vector<std::byte*>(), root);
      });
      expect_of(got, rank.rank(), "scatter");

      rank.run([&] {
        return reduce_scatter(rank.ranks(), reinterpret_cast<std::byte*>(got.data()), pointers(all), kNumbers,
                              Dtype::kInt32, Op::kSum);
      });
      for (std::size_t i = 0; i < kNumbers; i += 101)
        ASSERT_EQ(got[i], size * of(rank.rank(), i)) << "reduce_scatter";

      std::vector<int> reduced = own_numbers;
      rank.run([&] {
        return reduce(rank.ranks(), reinterpret_cast<std::byte*>(reduced.data()), kNumbers, Dtype::kInt32,
                      Op::kMax, root);
      });
      expect_of(reduced, rank.rank(), rank.rank() == root ? "reduce" : "reduce leaves what others have");

      // Rank q sends 30,000 (q + 1) numbers to each: parts of other sizes, of more than one slot.
      std::vector<std::vector<int>> in, out;
      std::vector<Span> to, from;
      for (int who = 0; who < size; ++who) {
        in.emplace_back(30'000 * static_cast<std::size_t>(rank.rank() + 1),
                        of(rank.rank(), static_cast<std::size_t>(who)));
        out.emplace_back(30'000 * static_cast<std::size_t>(who + 1), -1);
      }
      for (int who = 0; who < size; ++who) {
        from.push_back(Rank::span(in[static_cast<std::size_t>(who)]));
        to.push_back(Rank::span(out[static_cast<std::size_t>(who)]));
      }
      rank.run([&] { return all_to_all(rank.ranks(), to, from); });
      for (int who = 0; who < size; ++who) {
        for (const int number : out[static_cast<std::size_t>(who)])
          ASSERT_EQ(number, of(who, static_cast<std::size_t>(rank.rank())));
      }
    });
  }
}

TEST(ShmTest, SixteenRanksOnAnyNumberOfCores) {
  run_threads(16, [](Rank& rank) {
    std::vector<int> list(20'000, rank.rank());
    for (int round = 0; round < 3; ++round) {
      list.assign(list.size(), rank.rank() + round);
      rank.sum(list, Dtype::kInt32);
      EXPECT_TRUE(
          std::all_of(list.begin(), list.end(), [&](int number) { return number == 120 + 16 * round; }));
    }
  });
}

TEST(ShmTest, RowsThatDoNotMatchAreAnError) {
  run_threads(3, [](Rank& rank) {
    std::vector<std::byte> from(30), to(30);
    const auto parts = [](std::vector<std::byte>& all, std::array<std::size_t, 3> sizes) {
      std::vector<Span> spans;
      std::size_t at = 0;
      for (const std::size_t size : sizes) spans.push_back({all.data() + std::exchange(at, at + size), size});
      return spans;
    };
    const auto run = [&](std::array<std::size_t, 3> sends, std::array<std::size_t, 3> expects) {
      rank.run([&] { return all_to_all(rank.ranks(), parts(to, expects), parts(from, sends)); });
    };
    run({1, 2, 3}, {static_cast<std::size_t>(rank.rank()) + 1, static_cast<std::size_t>(rank.rank()) + 1,
                    static_cast<std::size_t>(rank.rank()) + 1});
    if (rank.rank() == 2) {
      COHORT_EXPECT_THROW_WITH(run({4, 4, 4}, {5, 4, 4}), UsageError,
                               "rank 0 sends rank 2 4 bytes, which expects 5");
    } else {
      EXPECT_ANY_THROW(run({4, 4, 4}, {4, 4, 4}); rank.run([&] { return barrier(rank.ranks()); }));
    }
  });
}

}  // namespace
}  // namespace cohort::comm::shm

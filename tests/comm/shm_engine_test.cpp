// Shared memory without LibTorch: runs under sanitizers. Ranks are threads, and processes where they must
// die.
#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "cohort/comm/shm/arena.h"
#include "cohort/comm/shm/collectives.h"
#include "cohort/comm/shm/engine.h"
#include "cohort/comm/shm/kernels.h"
#include "cohort/core/error.h"
#include "tests/launch/map_board.h"
#include "tests/support/processes.h"
#include "tests/support/throws.h"

namespace cohort::comm::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::MapBoard;

// ------------------------------------------------------------------------------------------------- kernels

template <typename T>
std::vector<T> numbers(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> list(n);
  for (T& one : list) one = static_cast<T>(static_cast<int>(random() % 200) - 100);
  return list;
}

template <typename T>
T expected(Op op, T a, T b, T c) {
  switch (op) {
    case Op::kSum:
      return static_cast<T>(static_cast<T>(a + b) + c);
    case Op::kAvg:
      return static_cast<T>(static_cast<T>(static_cast<T>(a + b) + c) / static_cast<T>(3));
    case Op::kProduct:
      return static_cast<T>(static_cast<T>(a * b) * c);
    case Op::kMin:
      return std::min({a, b, c});
    case Op::kMax:
      return std::max({a, b, c});
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == Op::kAnd) return static_cast<T>(a & b & c);
    if (op == Op::kOr) return static_cast<T>(a | b | c);
    if (op == Op::kXor) return static_cast<T>(a ^ b ^ c);
  }
  return T{};
}

template <typename T>
void expect_reduces(const Kernels& kernels, Dtype dtype) {
  for (int op = 0; op < kOps; ++op) {
    const Reduce reduce = kernels.reduce[static_cast<int>(dtype)][op];
    if (reduce == nullptr) {
      EXPECT_TRUE(std::is_floating_point_v<T> && op >= static_cast<int>(Op::kAnd))
          << name_of(static_cast<Op>(op));
      continue;
    }
    for (const std::size_t n :
         {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{1025}, std::size_t{5000}}) {
      for (const bool stream : {false, true}) {
        // One byte off the alignment that T asks for is not legal; one T is what a view may have.
        std::vector<T> a = numbers<T>(n + 1, 1), b = numbers<T>(n + 1, 2), c = numbers<T>(n + 1, 3),
                       second(n + 1);
        std::vector<T> want(n);
        for (std::size_t i = 0; i < n; ++i)
          want[i] = expected<T>(static_cast<Op>(op), a[i + 1], b[i + 1], c[i + 1]);
        const void* from[] = {a.data() + 1, b.data() + 1, c.data() + 1};
        void* to[] = {b.data() + 1, second.data() + 1};  // the first is one that is read
        reduce(to, 2, from, 3, n, stream);
        for (std::size_t i = 0; i < n; ++i) {
          ASSERT_EQ(b[i + 1], want[i])
              << kernels.name << " " << name_of(dtype) << " " << name_of(static_cast<Op>(op)) << " " << i;
          ASSERT_EQ(second[i + 1], want[i]);
        }
        ASSERT_EQ(b[0], numbers<T>(n + 1, 2)[0]) << "before the first number something was written";
      }
    }
  }
}

TEST(KernelsTest, EverySetOfInstructionsReducesEveryTypeAlike) {
  int sets = 0;
  for (const Kernels* const* one = all_kernels(); *one != nullptr; ++one, ++sets) {
    expect_reduces<float>(**one, Dtype::kFloat);
    expect_reduces<double>(**one, Dtype::kDouble);
    expect_reduces<std::int8_t>(**one, Dtype::kInt8);
    expect_reduces<std::uint8_t>(**one, Dtype::kUint8);
    expect_reduces<std::int16_t>(**one, Dtype::kInt16);
    expect_reduces<std::uint16_t>(**one, Dtype::kUint16);
    expect_reduces<std::int32_t>(**one, Dtype::kInt32);
    expect_reduces<std::uint32_t>(**one, Dtype::kUint32);
    expect_reduces<std::int64_t>(**one, Dtype::kInt64);
    expect_reduces<std::uint64_t>(**one, Dtype::kUint64);
  }
  EXPECT_GE(sets, 1);
}

float from_half(std::uint16_t half) {
  const int sign = half >> 15, exponent = half >> 10 & 31, fraction = half & 1023;
  float value = 0;
  if (exponent == 31) {
    value = fraction == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    value = std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  }
  return sign == 1 ? -value : value;
}

// The half nearest to a number, halves to even, by looking at all of them.
std::uint16_t nearest_half(float value) {
  std::uint16_t best = 0;
  double distance = 1e30;
  for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const double off =
        std::abs(static_cast<double>(from_half(static_cast<std::uint16_t>(bits))) - std::abs(value));
    if (off < distance || (off == distance && bits % 2 == 0)) {
      best = static_cast<std::uint16_t>(bits);
      distance = off;
    }
  }
  if (std::abs(value) >= 65520) best = 0x7c00;
  return static_cast<std::uint16_t>(best | (value < 0 ? 0x8000 : 0));
}

TEST(KernelsTest, HalvesAreSummedAsFloatAndRoundedOnce) {
  // Every half comes through unchanged, alone; and sums of three are rounded once.
  std::vector<std::uint16_t> all(65536);
  std::iota(all.begin(), all.end(), 0);
  for (const Kernels* const* one = all_kernels(); *one != nullptr; ++one) {
    std::vector<std::uint16_t> out(all.size());
    const void* from[] = {all.data()};
    void* to[] = {out.data()};
    (*one)->reduce[static_cast<int>(Dtype::kHalf)][static_cast<int>(Op::kSum)](to, 1, from, 1, all.size(),
                                                                               false);
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (std::isnan(from_half(all[i]))) {
        ASSERT_TRUE(std::isnan(from_half(out[i]))) << i;
      } else {
        ASSERT_EQ(out[i], all[i]) << (*one)->name;
      }
    }
    // 2048 + 1 is not a half, 2048 + 1 + 1 is; the smallest ones; one that becomes infinite; one between.
    const std::vector<std::vector<float>> sums = {
        {2048, 1, 1},   {1, 1e-3F, 1e-3F},  {6e-8F, 6e-8F, 6e-8F},     {65504, 15, 0},
        {65504, 16, 0}, {0.1F, 0.2F, 0.3F}, {-3e-5F, -3.1e-5F, 1e-6F}, {-65504, -65504, 1}};
    for (const auto& sum : sums) {
      // Ten times over: by eights, and the rest one by one.
      std::vector<std::vector<std::uint16_t>> parts;
      float total = 0;
      for (const float part : sum) {
        parts.emplace_back(11, nearest_half(part));
        total += from_half(parts.back()[0]);
      }
      const void* sources[] = {parts[0].data(), parts[1].data(), parts[2].data()};
      std::vector<std::uint16_t> result(11);
      void* target[] = {result.data()};
      (*one)->reduce[static_cast<int>(Dtype::kHalf)][static_cast<int>(Op::kSum)](target, 1, sources, 3, 11,
                                                                                 false);
      for (const std::uint16_t got : result)
        EXPECT_EQ(got, nearest_half(total)) << (*one)->name << " " << total;
    }
  }
}

TEST(KernelsTest, BFloat16IsSummedAsFloatAndRoundedToEven) {
  const auto shorten = [](float value) {
    return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  };
  for (const Kernels* const* one = all_kernels(); *one != nullptr; ++one) {
    const auto sum = [&](float a, float b, float c) {
      const std::uint16_t parts[] = {shorten(a), shorten(b), shorten(c)};
      const void* from[] = {&parts[0], &parts[1], &parts[2]};
      std::uint16_t out = 0;
      void* to[] = {&out};
      (*one)->reduce[static_cast<int>(Dtype::kBFloat16)][static_cast<int>(Op::kSum)](to, 1, from, 3, 1,
                                                                                     false);
      return std::bit_cast<float>(static_cast<std::uint32_t>(out) << 16);
    };
    EXPECT_EQ(sum(256, 1, 1), 258);  // 257 is none, so rounding twice would give 256
    EXPECT_EQ(sum(256, 1, 0), 256);  // half way: to even
    EXPECT_EQ(sum(258, 1, 0), 260);  // half way: to even
    EXPECT_TRUE(std::isnan(sum(1, std::numeric_limits<float>::quiet_NaN(), 1)));
  }
}

TEST(KernelsTest, WhatIsNotANumberStaysInMinimumAndMaximum) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Kernels* const* one = all_kernels(); *one != nullptr; ++one) {
    for (const Op op : {Op::kMin, Op::kMax}) {
      std::vector<float> a(40, 1), b(40, 2), out(40);
      a[3] = nan;
      b[33] = nan;
      const void* from[] = {a.data(), b.data()};
      void* to[] = {out.data()};
      (*one)->reduce[0][static_cast<int>(op)](to, 1, from, 2, 40, false);
      EXPECT_TRUE(std::isnan(out[3]) && std::isnan(out[33])) << (*one)->name;
      EXPECT_EQ(out[0], op == Op::kMin ? 1 : 2);
    }
  }
}

// --------------------------------------------------------------------------------------------------- arena

TEST(ArenaTest, MemoryIsFoundUsedAgainAndJoined) {
  void* const a = arena_allocate(1000);
  void* const b = arena_allocate(1000);
  ASSERT_NE(a, b);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % 64, 0U);
  const auto place = arena_find(static_cast<char*>(b) + 10, 100);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->offset, arena_find(b, 1)->offset + 10);
  int on_the_stack = 0;
  EXPECT_FALSE(arena_find(&on_the_stack, 4));
  arena_free(a);
  arena_free(b);
  void* const both = arena_allocate(2048);  // only fits where the two were if they were joined
  EXPECT_EQ(both, a);
  arena_free(both);
  void* const large = arena_allocate(std::size_t{80} << 20);
  EXPECT_NE(arena_find(large, 1)->arena, place->arena);
  arena_free(large);
  EXPECT_EQ(arena_allocate(std::size_t{70} << 20), large);
  arena_free(large);
}

// --------------------------------------------------------------------------------------------------- ranks

// One rank: what it begins, and waits for.
class Rank {
 public:
  Rank(Board& board, int rank, int size, milliseconds timeout = seconds(20))
      : timeout_(timeout),
        engine_(std::make_unique<Communicator>(board, rank, size, core::Deadline(timeout))) {}
  int rank() { return engine_.ranks().rank(); }
  int size() { return engine_.ranks().size(); }
  Communicator& ranks() { return engine_.ranks(); }
  Engine& engine() { return engine_; }

  std::shared_ptr<Operation> begin(std::function<Task()> make, const char* call = "call",
                                   bool is_message = false) {
    auto operation = std::make_shared<Operation>(core::Deadline(timeout_));
    operation->call = call;
    operation->number = calls_++;
    operation->make = std::move(make);
    operation->is_message = is_message;
    engine_.begin(operation);
    return operation;
  }
  void wait(const std::shared_ptr<Operation>& operation) {
    engine_.wait(*operation, core::Deadline::never());
  }
  void run(std::function<Task()> make, const char* call = "call") { wait(begin(std::move(make), call)); }

  template <typename T>
  void sum(std::vector<T>& list, Dtype dtype, Op op = Op::kSum) {
    sum(list.data(), list.size(), dtype, op);
  }
  template <typename T>
  void sum(T* data, std::size_t numel, Dtype dtype, Op op = Op::kSum) {
    run([&] { return all_reduce(ranks(), reinterpret_cast<std::byte*>(data), numel, dtype, op); },
        "all_reduce");
  }
  std::shared_ptr<Operation> send(int to, std::vector<int>& data, int tag) {
    return begin([this, to, &data, tag] { return engine_.messages().send(to, span(data), tag); }, "send",
                 true);
  }
  std::shared_ptr<Operation> recv(int from, std::vector<int>& data, int tag, int* source) {
    return begin(
        [this, from, &data, tag, source] { return engine_.messages().recv(from, span(data), tag, source); },
        "recv", true);
  }
  template <typename T>
  static Span span(std::vector<T>& data) {
    return {reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(T)};
  }

 private:
  milliseconds timeout_;
  std::uint64_t calls_ = 0;
  Engine engine_;
};

// Throws what the lowest rank threw.
void run_threads(int size, const std::function<void(Rank&)>& body, milliseconds timeout = seconds(20)) {
  MapBoard board;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Rank one(board, rank, size, timeout);
        body(one);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

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
        std::vector<float> mine(n);
        for (std::size_t i = 0; i < n; ++i) mine[i] = value(rank.rank(), i);
        rank.sum(mine, Dtype::kFloat);
        ASSERT_EQ(mine, sum_of_all(size, n)) << n << " numbers, " << size << " ranks";
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
      std::vector<int> mine(kNumbers);
      for (std::size_t i = 0; i < kNumbers; ++i) mine[i] = of(rank.rank(), i);
      const auto pointers = [&](std::vector<std::vector<int>>& lists) {
        std::vector<std::byte*> list;
        for (auto& one : lists) list.push_back(reinterpret_cast<std::byte*>(one.data()));
        return list;
      };
      const auto expect_of = [&](const std::vector<int>& got, int who, const char* call) {
        for (std::size_t i = 0; i < kNumbers; i += 101) ASSERT_EQ(got[i], of(who, i)) << call;
        ASSERT_EQ(got.back(), of(who, kNumbers - 1)) << call;
      };

      std::vector<int> sent = mine;
      rank.run([&] { return broadcast(rank.ranks(), Rank::span(sent), root); });
      expect_of(sent, root, "broadcast");

      std::vector<std::vector<int>> all(n, std::vector<int>(kNumbers));
      rank.run([&] { return all_gather(rank.ranks(), pointers(all), Rank::span(mine)); });
      for (int who = 0; who < size; ++who) expect_of(all[static_cast<std::size_t>(who)], who, "all_gather");

      for (auto& one : all) one.assign(kNumbers, -1);
      rank.run([&] {
        return gather(rank.ranks(), rank.rank() == root ? pointers(all) : std::vector<std::byte*>(),
                      Rank::span(mine), root);
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

      std::vector<int> reduced = mine;
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
        for (const int one : out[static_cast<std::size_t>(who)])
          ASSERT_EQ(one, of(who, static_cast<std::size_t>(rank.rank())));
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
      EXPECT_TRUE(std::all_of(list.begin(), list.end(), [&](int one) { return one == 120 + 16 * round; }));
    }
  });
}

TEST(ShmTest, SeveralGroupsAndRanksThatComeWhenTheyLikeDoNotDisturbEachOther) {
  constexpr int kSize = 3, kRounds = 60;
  std::array<MapBoard, 3> boards;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<std::unique_ptr<Rank>> groups;
      for (auto& board : boards) groups.push_back(std::make_unique<Rank>(board, rank, kSize));
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
          for (const int one : lists[g])
            ASSERT_EQ(one, 3 * round + 3) << "group " << g << ", round " << round;
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
    const core::Deadline deadline(seconds(20));
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

// ------------------------------------------------------------------------------------------------ messages

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
    for (const auto& one : {a, b, c}) rank.wait(one);
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
      std::vector<int> mine(5, rank.rank());
      rank.wait(rank.send(0, mine, 9));
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

// -------------------------------------------------------------------------------------------------- faults

TEST(ShmFaultTest, CallsThatDifferAreAnErrorOnEveryRankAndNameBoth) {
  run_threads(2, [](Rank& rank) {
    std::vector<float> list(rank.rank() == 0 ? 10 : 12);
    const char* mine = rank.rank() == 0 ? "rank 0 all_reduce of 40 bytes float SUM"
                                        : "rank 1 all_reduce of 48 bytes float SUM";
    const char* theirs = rank.rank() == 1 ? "rank 0 all_reduce of 40 bytes float SUM"
                                          : "rank 1 all_reduce of 48 bytes float SUM";
    const auto call = [&] { rank.sum(list, Dtype::kFloat); };
    COHORT_EXPECT_THROW_WITH(call(), Error, std::string(mine) + ", " + theirs);
    COHORT_EXPECT_THROW_WITH(rank.sum(list, Dtype::kFloat), CommError, "the group failed before");
  });
}

TEST(ShmFaultTest, ADeadlineNamesTheCallAndTheRanksThatAreMissing) {
  run_threads(
      4,
      [](Rank& rank) {
        std::vector<float> list(100, 1);
        if (rank.rank() % 2 == 0) {
          const core::Deadline waited(seconds(60));
          COHORT_EXPECT_THROW_WITH(rank.sum(list, Dtype::kFloat), Error, "all_reduce 0 of rank");
          EXPECT_LT(waited.elapsed(), seconds(3));
        } else {
          std::this_thread::sleep_for(milliseconds(1200));
        }
      },
      milliseconds(600));
  MapBoard board;
  std::thread late([&] {
    Rank rank(board, 1, 2);
    std::this_thread::sleep_for(milliseconds(700));
  });
  {
    Rank rank(board, 0, 2, milliseconds(300));
    std::vector<float> list(100, 1);
    COHORT_EXPECT_THROW_WITH(rank.sum(list, Dtype::kFloat), TimeoutError, "rank 1 has not come");
  }
  late.join();
}

TEST(ShmFaultTest, AWaitThatEndsSoonerThanTheCallDoesNotEndTheCall) {
  run_threads(2, [](Rank& rank) {
    std::vector<float> list(100'000, 1);
    if (rank.rank() == 1) std::this_thread::sleep_for(milliseconds(300));
    const auto begun = rank.begin([&] {
      return all_reduce(rank.ranks(), reinterpret_cast<std::byte*>(list.data()), list.size(), Dtype::kFloat,
                        Op::kSum);
    });
    if (rank.rank() == 0) {
      COHORT_EXPECT_THROW_WITH(rank.engine().wait(*begun, core::Deadline(milliseconds(50))), TimeoutError,
                               "is not over after");
    }
    rank.wait(begun);
    EXPECT_EQ(list[99'999], 2);
  });
}

TEST(ShmFaultTest, ARankThatLeavesIsNamedAtOnce) {
  run_threads(2, [](Rank& rank) {
    std::vector<float> list(10);
    rank.sum(list, Dtype::kFloat);
    if (rank.rank() == 1) return;
    const core::Deadline waited(seconds(60));
    COHORT_EXPECT_THROW_WITH(rank.sum(list, Dtype::kFloat), PeerError, "rank 1 has left the group");
    EXPECT_LT(waited.elapsed(), seconds(1));
  });
}

TEST(ShmFaultTest, WhatIsUnderWayWhenAGroupIsAbortedOrClosesFails) {
  MapBoard board;
  std::vector<float> list(100'000);
  std::atomic<bool> over{false};
  std::thread other([&] {
    const Rank rank(board, 1, 2);
    while (!over.load()) std::this_thread::sleep_for(milliseconds(1));
  });
  const auto begin = [&list](Rank& rank) {
    return rank.begin([&] {
      return all_reduce(rank.ranks(), reinterpret_cast<std::byte*>(list.data()), list.size(), Dtype::kFloat,
                        Op::kSum);
    });
  };
  {
    Rank rank(board, 0, 2);
    const auto begun = begin(rank);
    rank.engine().cancel("it was aborted");
    COHORT_EXPECT_THROW_WITH(rank.wait(begun), CommError, "it was aborted");
  }
  over.store(true);
  other.join();
  MapBoard again;
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

TEST(ShmFaultTest, RanksThatDoNotComeAreNamedWhenTheGroupIsMade) {
  MapBoard board;
  COHORT_EXPECT_THROW_WITH(Rank(board, 0, 2, milliseconds(100)), RendezvousError, "rank 1 of 2 did not come");
}

TEST(ShmFaultTest, AnotherHostIsRefusedByName) {
  MapBoard board;
  board.set("contact/1", "other-boot/net:[1] node7 00001 token");
  COHORT_EXPECT_THROW_WITH(Rank(board, 0, 2, seconds(5)), UsageError, "rank 1 on node7");
}

// Ranks as processes: they meet in a folder.
class FolderBoard : public Board {
 public:
  explicit FolderBoard(std::filesystem::path folder) : folder_(std::move(folder)) {}
  void set(const std::string& key, const std::string& value) override {
    const auto path = path_of(key);
    test::write_file(path.string() + ".new", value);
    std::filesystem::rename(path.string() + ".new", path);
  }
  bool has(const std::string& key) override { return std::filesystem::exists(path_of(key)); }
  std::string get(const std::string& key) override { return test::read_file(path_of(key)); }

 private:
  std::filesystem::path path_of(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '-');
    return folder_ / key;
  }
  std::filesystem::path folder_;
};

// Sums until a rank is killed; then says what it threw, and how long after the last sum.
TEST(ShmRankChild, DISABLED_SumsUntilSomethingHappens) {
  FolderBoard board(std::getenv("TEST_FOLDER"));
  const std::string timeout = std::getenv("TEST_TIMEOUT_MS");
  Rank rank(board, std::stoi(std::getenv("RANK")), std::stoi(std::getenv("WORLD_SIZE")),
            milliseconds(std::stol(timeout)));
  std::vector<float> list(100'000, 1);
  auto last = std::chrono::steady_clock::now();
  try {
    for (int round = 0;; ++round) {
      rank.sum(list, Dtype::kFloat, Op::kMax);
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
  EXPECT_LT(waited, 3000);
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

}  // namespace
}  // namespace cohort::comm::shm

#include "cohort/net/internal/free_ranges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

namespace cohort::net {
namespace {

TEST(FreeRangesTest, TheShortestPartThatIsLongEnoughIsTakenAndNeighboursAreJoined) {
  FreeRanges free({100, 1000});
  EXPECT_FALSE(free.take_warm(1));
  EXPECT_EQ(free.take_cold(10), (Range{100, 10}));
  EXPECT_EQ(free.take_cold(30), (Range{110, 30}));
  EXPECT_EQ(free.take_cold(20), (Range{140, 20}));
  free.give_warm({100, 10});
  free.give_warm({140, 20});
  EXPECT_EQ(free.take_warm(15), (Range{140, 15}));
  EXPECT_FALSE(free.take_warm(11)) << "parts of 10 and 5 bytes are left";
  free.give_warm({140, 15});
  free.give_warm({110, 30});
  EXPECT_EQ(free.take_warm(60), (Range{100, 60})) << "all three are one part";
  EXPECT_FALSE(free.take_cold(941));
  EXPECT_EQ(free.take_cold(940), (Range{160, 940}));
}

TEST(FreeRangesTest, WarmPartsAboveALimitAreTakenFromTheEndOfTheLongest) {
  FreeRanges free({0, 100});
  ASSERT_TRUE(free.take_cold(100));
  free.give_warm({0, 10});
  free.give_warm({20, 60});
  EXPECT_EQ(free.take_warm_above(30), (std::vector<Range>{{40, 40}}));
  EXPECT_EQ(free.warm_bytes(), 30U);
  EXPECT_TRUE(free.take_warm_above(30).empty());
  EXPECT_EQ(free.take_warm_above(0).size(), 2U);
}

// Beside a model that knows the kind of each byte.
TEST(FreeRangesTest, RandomProgramsNeverGiveOutAByteTwice) {
  constexpr std::uint64_t kBytes = 300;
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    FreeRanges free({0, kBytes});
    std::string kinds(kBytes, 'c');  // cold, warm or used
    std::vector<Range> used;
    const auto mark = [&](Range range, char from, char to) {
      for (std::uint64_t i = range.offset; i < range.offset + range.size; ++i) {
        ASSERT_EQ(kinds.at(i), from) << "seed " << seed;
        kinds[i] = to;
      }
    };
    for (int step = 0; step < 300; ++step) {
      const std::uint64_t size = 1 + random() % 40;
      switch (random() % 5) {
        case 0:
        case 1: {
          const bool is_warm = random() % 2 == 0;
          const auto range = is_warm ? free.take_warm(size) : free.take_cold(size);
          const char kind = is_warm ? 'w' : 'c';
          EXPECT_EQ(range.has_value(), kinds.find(std::string(size, kind)) != std::string::npos) << seed;
          if (!range) break;
          mark(*range, kind, 'u');
          used.push_back(*range);
          break;
        }
        case 2:
        case 3: {
          if (used.empty()) break;
          std::swap(used[random() % used.size()], used.back());
          const bool is_warm = random() % 2 == 0;
          is_warm ? free.give_warm(used.back()) : free.give_cold(used.back());
          mark(used.back(), 'u', is_warm ? 'w' : 'c');
          used.pop_back();
          break;
        }
        case 4:
          for (const Range range : free.take_warm_above(random() % 200)) {
            mark(range, 'w', 'c');
            free.give_cold(range);
          }
          break;
      }
      ASSERT_EQ(free.warm_bytes(), static_cast<std::uint64_t>(std::count(kinds.begin(), kinds.end(), 'w')));
      ASSERT_EQ(free.cold_bytes(), static_cast<std::uint64_t>(std::count(kinds.begin(), kinds.end(), 'c')));
    }
  }
}

}  // namespace
}  // namespace cohort::net

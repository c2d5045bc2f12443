#include "cohort/data/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "cohort/base/error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::data {
namespace {

struct Golden {
  std::string name, bar;
  std::int64_t size = 0, epoch = 0, world = 0, rank = 0, drop_last = 0, shuffle = 0, count = 0;
  std::uint64_t seed = 0, checksum = 0;
  std::vector<std::int64_t> head;
};

std::vector<Golden> golden_orders() {
  std::vector<Golden> all;
  std::istringstream file(test::read_golden("data_samplers.txt"));
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream in(line);
    Golden g;
    in >> g.name >> g.size >> g.seed >> g.epoch >> g.world >> g.rank >> g.drop_last >> g.shuffle >> g.count >>
        g.checksum >> g.bar;
    for (std::int64_t index = 0; in >> index;) g.head.push_back(index);
    all.push_back(g);
  }
  return all;
}

std::uint64_t checksum(const std::vector<std::int64_t>& order) {
  unsigned __int128 sum = 0;
  for (const std::int64_t index : order) {
    sum = (sum * 1000003 + static_cast<unsigned __int128>(index)) % ((std::uint64_t{1} << 61) - 1);
  }
  return static_cast<std::uint64_t>(sum);
}

TEST(SamplerTest, OrdersEqualThoseOfPyTorch) {
  const std::vector<Golden> all = golden_orders();
  ASSERT_GT(all.size(), 80U);
  for (const Golden& g : all) {
    SCOPED_TRACE(g.name + " size " + std::to_string(g.size) + " world " + std::to_string(g.world) + " rank " +
                 std::to_string(g.rank) + " epoch " + std::to_string(g.epoch));
    std::vector<std::int64_t> order;
    if (g.name == "random") {
      order = RandomSampler(g.size, g.seed).order(g.epoch);
    } else {
      const DistributedSampler sampler(g.size,
                                       {g.world, g.shuffle != 0, g.seed,
                                        g.drop_last != 0 ? LastBatchPolicy::kDrop : LastBatchPolicy::kPad});
      order = sampler.share(g.epoch, g.rank);
      EXPECT_EQ(sampler.size(), g.count * g.world);
    }
    ASSERT_EQ(static_cast<std::int64_t>(order.size()), g.count);
    EXPECT_TRUE(std::equal(g.head.begin(), g.head.end(), order.begin()));
    EXPECT_EQ(checksum(order), g.checksum);
  }
}

TEST(SamplerTest, SequentialIsTheIdentity) {
  EXPECT_EQ(SequentialSampler(4).order(7), (std::vector<std::int64_t>{0, 1, 2, 3}));
}

TEST(SamplerTest, OneRankReadsWhatARandomSamplerSays) {
  EXPECT_EQ(DistributedSampler(500, {.seed = 3}).order(2), RandomSampler(500, 3).order(2));
}

TEST(SamplerTest, KeepNeitherRepeatsNorDrops) {
  const DistributedSampler sampler(10,
                                   {.world_size = 4, .shuffle = false, .last_batch = LastBatchPolicy::kKeep});
  EXPECT_EQ(sampler.share(0, 1), (std::vector<std::int64_t>{1, 5, 9}));
  EXPECT_EQ(sampler.share(0, 3), (std::vector<std::int64_t>{3, 7}));
}

TEST(SamplerTest, RejectsWhatCannotBe) {
  COHORT_EXPECT_THROW_WITH(SequentialSampler(-1), UsageError, "size is -1");
  COHORT_EXPECT_THROW_WITH(DistributedSampler(4, {.world_size = 0}), UsageError, "world_size is 0");
  COHORT_EXPECT_THROW_WITH(DistributedSampler(4, {.world_size = 2}).share(0, 2), UsageError,
                           "rank is 2, expected 0 to 1");
}

}  // namespace
}  // namespace cohort::data

// A loader of several shares hands out what as many loaders of one share hand out.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <set>

#include "cohort/base/error.h"
#include "cohort/data/loader.h"
#include "tests/data/number_pairs.h"
#include "tests/support/throws.h"

namespace cohort::data {
namespace {

/// What a step gets of one share.
struct ShareOfStep {
  std::vector<std::int64_t> indices;
  std::int64_t whole_size = 0;
};
using SharesOfStep = std::map<std::int64_t, ShareOfStep>;

/// Takes all parts of a batch. Shares come in their order, without a gap in any.
void take_shares(Batch& batch, SharesOfStep& shares) {
  std::int64_t last = -1;
  do {
    EXPECT_GE(batch.share, last);
    EXPECT_TRUE(batch.share == last || !shares.contains(batch.share));
    last = batch.share;
    ShareOfStep& share = shares[batch.share];
    share.whole_size = batch.whole_size;
    share.indices.insert(share.indices.end(), batch.indices.begin(), batch.indices.end());
    EXPECT_EQ(batch.input().size(0), batch.size);
    if (batch.size > 0) {
      EXPECT_EQ(batch.input()[0][0].item<float>(), 2 * batch.indices[0]);
    }
  } while (batch.advance());
  EXPECT_EQ(batch.share, last);
}

/// Shares without a sample are told only where a loader has no other.
void drop_empty(SharesOfStep& shares) {
  std::erase_if(shares, [](const auto& entry) { return entry.second.indices.empty(); });
}

void expect_same_shares(SharesOfStep found, SharesOfStep expected) {
  drop_empty(found);
  drop_empty(expected);
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [share, samples] : expected) {
    EXPECT_EQ(found[share].indices, samples.indices) << "share " << share;
    EXPECT_EQ(found[share].whole_size, samples.whole_size) << "share " << share;
    EXPECT_EQ(std::ssize(samples.indices), samples.whole_size);
  }
}

TEST(LoaderSharesTest, RandomLoadersHandOutTheSameSharesHoweverTheyAreDividedAmongThem) {
  std::mt19937 random(11);
  const auto draw = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  for (int round = 0; round < 60; ++round) {
    const std::int64_t samples = draw(1, 60), world = draw(1, 6);
    LoaderOptions options{.batch_size = draw(1, 5)};
    if (draw(0, 1) == 1) options.global_batch_size = draw(world, 30);
    options.parts = draw(1, 4);
    options.shuffle = draw(0, 1) == 1;
    options.drop_last = draw(0, 3) == 0;
    options.last_batch = draw(0, 1) == 1 ? LastBatchPolicy::kKeep : LastBatchPolicy::kPad;
    options.workers = static_cast<int>(draw(0, 2));
    options.prefetch = static_cast<int>(draw(1, 4));
    options.world_size = world;
    options.seed = 3;
    SCOPED_TRACE(testing::Message() << "round " << round << ": " << samples << " samples, " << world
                                    << " shares, parts " << options.parts);
    std::vector<std::unique_ptr<Loader>> single, several;
    for (options.rank = 0; options.rank < world; ++options.rank) {
      single.push_back(std::make_unique<Loader>(number_pairs(samples), options));
    }
    for (options.rank = 0; options.rank < world; options.rank += options.num_shares) {
      options.num_shares = draw(1, world - options.rank);
      several.push_back(std::make_unique<Loader>(number_pairs(samples), options));
    }
    for (int ends = 0; ends < 2;) {  // two epochs
      SharesOfStep expected, found;
      std::size_t batches = 0;
      for (auto& loader : single) {
        if (auto batch = loader->next()) take_shares(*batch, expected), ++batches;
      }
      ASSERT_TRUE(batches == 0 || batches == single.size());
      for (auto& loader : several) {
        auto batch = loader->next();
        ASSERT_EQ(batch.has_value(), batches > 0);
        if (batch) take_shares(*batch, found);
        EXPECT_EQ(loader->state(), single[0]->state());
        EXPECT_EQ(loader->batches_per_epoch(), single[0]->batches_per_epoch());
      }
      expect_same_shares(found, expected);
      if (batches == 0) ++ends;
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(LoaderSharesTest, SharesMayChangeBetweenTwoBatches) {
  LoaderOptions options{.batch_size = 2, .workers = 1, .shuffle = true, .seed = 3};
  options.world_size = 4;
  options.num_shares = 4;
  Loader fixed(number_pairs(44), options), changing(number_pairs(44), options);
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{0, 4}, {1, 2}, {3, 1}, {0, 4},
                                                          {2, 1}, {0, 3}, {0, 4}};
  for (const auto& [rank, count] : blocks) {
    changing.set_shares(rank, count);
    EXPECT_EQ(changing.options().num_shares, count);
    auto expected_batch = fixed.next(), batch = changing.next();
    ASSERT_EQ(batch.has_value(), expected_batch.has_value());
    if (!batch) continue;  // after six batches
    SharesOfStep expected, found;
    take_shares(*expected_batch, expected);
    take_shares(*batch, found);
    std::erase_if(expected,
                  [&](const auto& share) { return share.first < rank || share.first >= rank + count; });
    expect_same_shares(found, expected);
  }
  EXPECT_EQ(fixed.state(), changing.state());
  changing.set_shares(1, 1);
  EXPECT_TRUE(changing.next()) << "the end of the epoch was told, so another begins";
}

TEST(LoaderSharesTest, AStateBetweenTwoSharesBeginsTheBatchAnew) {
  LoaderOptions options{.batch_size = 2, .parts = 2};
  options.world_size = options.num_shares = 3;
  Loader loader(number_pairs(12), options);
  auto batch = loader.next();
  EXPECT_TRUE(batch->advance());
  EXPECT_EQ(loader.state().samples_consumed, 0);
  COHORT_EXPECT_THROW_WITH(loader.set_shares(0, 1), UsageError, "between two parts of a batch");
  COHORT_EXPECT_THROW_WITH(loader.next(), UsageError,
                           "parts that were not taken. Try: while (batch.advance()) in the step: the loader "
                           "reads several shares");
  while (batch->advance()) {
  }
  EXPECT_EQ(loader.state().samples_consumed, 6);
}

TEST(LoaderSharesTest, ShareOfSkippedSamplesIsPassedOver) {
  /// Cannot read the samples of which the test says so.
  class Broken : public ExampleDataset {
   public:
    explicit Broken(std::set<std::int64_t> bad) : bad_(std::move(bad)) {}
    std::int64_t size() const override { return 8; }
    std::vector<at::Tensor> get(std::int64_t index, base::RandomStream&) const override {
      if (is_broken && bad_.contains(index)) throw std::runtime_error("cannot decode");
      return {at::full({2}, 2 * float(index)), at::scalar_tensor(index, at::kLong)};
    }

    std::atomic<bool> is_broken{false};  // not while the loader asks for the fields of a sample

   private:
    std::set<std::int64_t> bad_;
  };
  const auto break_samples = [](const std::set<std::int64_t>& bad, const LoaderOptions& options) {
    const auto dataset = std::make_shared<Broken>(bad);
    auto loader = std::make_unique<Loader>(dataset, options);
    dataset->is_broken = true;
    return loader;
  };
  LoaderOptions options{.batch_size = 2, .on_error = OnError::kSkip};
  options.world_size = options.num_shares = 4;
  // Shares are {0, 4}, {1, 5}, {2, 6}, {3, 7}.
  const std::pair<std::set<std::int64_t>, std::vector<std::int64_t>> cases[] = {
      {{0, 4}, {1, 2, 3}}, {{3, 7}, {0, 1, 2}}, {{2, 3, 5, 6, 7}, {0, 1}}, {{0, 1, 2, 3, 4, 5, 6}, {3}}};
  for (const auto& [bad, shares] : cases) {
    const auto loader = break_samples(bad, options);
    SharesOfStep found;
    auto batch = loader->next();
    take_shares(*batch, found);
    std::vector<std::int64_t> seen;
    for (const auto& [share, samples] : found) seen.push_back(share);
    EXPECT_EQ(seen, shares);
    EXPECT_EQ(loader->state().samples_consumed, 8);
    EXPECT_FALSE(loader->next());
  }
  const auto loader = break_samples({0, 1, 2, 3, 4, 5, 6, 7}, options);
  auto batch = loader->next();
  EXPECT_EQ(batch->size, 0);
  EXPECT_FALSE(batch->advance());
}

TEST(LoaderSharesTest, SharesThatAreNotThereAreRejected) {
  LoaderOptions options;
  options.world_size = 4;
  options.rank = 2;
  for (const std::int64_t count : {0, 3}) {
    options.num_shares = count;
    COHORT_EXPECT_THROW_WITH(
        Loader(number_pairs(8), options), UsageError,
        base::concat("num_shares is ", count, ", expected 1 to 2 from rank 2 of world_size 4"));
  }
  options.num_shares = 2;
  Loader loader(number_pairs(8), options);
  COHORT_EXPECT_THROW_WITH(loader.set_shares(4, 1), UsageError, "rank is 4, expected 0 to 3");
}

}  // namespace
}  // namespace cohort::data

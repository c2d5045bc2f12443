// A batch that is handed out in parts holds what the whole batch holds.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>

#include "cohort/base/error.h"
#include "cohort/data/loader.h"
#include "tests/data/number_pairs.h"
#include "tests/support/throws.h"

namespace cohort::data {
namespace {

/// All parts of a batch, one after the other.
struct Whole {
  std::vector<at::Tensor> inputs, targets;
  std::vector<std::int64_t> indices;
  std::vector<std::int64_t> sizes;
  std::int64_t whole_size = 0, number = 0;

  explicit Whole(Batch& batch) : whole_size(batch.whole_size), number(batch.number) {
    do {
      EXPECT_EQ(batch.whole_size, whole_size);
      EXPECT_EQ(batch.number, number);
      inputs.push_back(batch.input().clone());
      targets.push_back(batch.target().clone());
      indices.insert(indices.end(), batch.indices.begin(), batch.indices.end());
      sizes.push_back(batch.size);
    } while (batch.advance());
    EXPECT_FALSE(batch.advance());
    EXPECT_EQ(batch.size, sizes.back()) << "what is no part of this rank changed the last one";
  }
};

void expect_same(const Whole& parts, const Batch& whole, std::int64_t part_size) {
  EXPECT_TRUE(at::equal(at::cat(parts.inputs), whole.fields[0]));
  EXPECT_TRUE(at::equal(at::cat(parts.targets), whole.fields[1]));
  EXPECT_TRUE(std::ranges::equal(parts.indices, whole.indices));
  EXPECT_EQ(parts.whole_size, whole.size);
  EXPECT_EQ(parts.number, whole.number);
  for (std::size_t i = 0; i < parts.sizes.size(); ++i) {
    if (i + 1 < parts.sizes.size()) {
      EXPECT_EQ(parts.sizes[i], part_size);
    } else {
      EXPECT_LE(parts.sizes[i], part_size);
      EXPECT_TRUE(parts.sizes[i] > 0 || parts.sizes.size() == 1);
    }
  }
}

TEST(LoaderPartsTest, RandomLoadersHandOutTheSameBatchesInPartsAndWhole) {
  std::mt19937 random(7);
  const auto draw = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  for (int round = 0; round < 120; ++round) {
    const std::int64_t samples = draw(1, 60), world = draw(1, 4);
    LoaderOptions options{.batch_size = draw(1, 12)};
    if (draw(0, 1) == 1) options.global_batch_size = draw(world, 30);
    options.shuffle = draw(0, 1) == 1;
    options.drop_last = draw(0, 3) == 0;
    options.last_batch = draw(0, 1) == 1 ? LastBatchPolicy::kKeep : LastBatchPolicy::kPad;
    options.workers = static_cast<int>(draw(0, 2));
    options.prefetch = static_cast<int>(draw(1, 4));
    options.world_size = world;
    options.seed = 3;
    LoaderOptions in_parts = options;
    in_parts.parts = draw(1, 6);
    const std::int64_t stop = draw(0, 8);  // the state after so many batches continues in a new loader
    SCOPED_TRACE(testing::Message() << "round " << round << ": " << samples << " samples, " << world
                                    << " ranks, batches of " << options.batch_size << " or global "
                                    << options.global_batch_size << ", parts " << in_parts.parts);
    for (std::int64_t rank = 0; rank < world; ++rank) {
      options.rank = in_parts.rank = rank;
      Loader whole(number_pairs(samples), options);
      auto parts = std::make_unique<Loader>(number_pairs(samples), in_parts);
      ASSERT_EQ(parts->batches_per_epoch(), whole.batches_per_epoch());
      const std::int64_t part_size = (whole.options().batch_size + in_parts.parts - 1) / in_parts.parts;
      EXPECT_EQ(parts->options().part_size(), part_size);
      std::int64_t batches = 0;
      for (int ends = 0; ends < 2;) {  // two epochs
        auto expected = whole.next();
        auto batch = parts->next();
        ASSERT_EQ(batch.has_value(), expected.has_value());
        if (!batch) {
          ++ends;
          continue;
        }
        expect_same(Whole(*batch), *expected, part_size);
        EXPECT_EQ(parts->state(), whole.state());
        if (++batches == stop) {
          const LoaderState state = parts->state();
          parts = std::make_unique<Loader>(number_pairs(samples), in_parts);
          parts->restore(state);
        }
      }
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(LoaderPartsTest, MemoryIsThatOfParts) {
  Loader loader(number_pairs(64), {.batch_size = 16, .parts = 4, .workers = 1, .prefetch = 1});
  while (auto batch = loader.next()) {
    do {
      EXPECT_EQ(batch->size, 4);
      EXPECT_EQ(batch->input().storage().nbytes(), 4 * 2 * sizeof(float));
    } while (batch->advance());
  }
  EXPECT_LE(loader.counters().buffer_allocations, 3);
  EXPECT_EQ(loader.counters().samples, 64);
}

TEST(LoaderPartsTest, PartsThatAreNotTakenAreAnErrorAndNotLost) {
  Loader loader(number_pairs(16), {.batch_size = 8, .parts = 2});
  auto batch = loader.next();
  COHORT_EXPECT_THROW_WITH(loader.next(), UsageError, "has parts that were not taken");
  EXPECT_TRUE(batch->advance());
  EXPECT_EQ(batch->indices[0], 4);
  EXPECT_EQ(loader.next()->indices[0], 8);
}

TEST(LoaderPartsTest, ABatchOfBeforeALeapHasNoNextPart) {
  Loader loader(number_pairs(16), {.batch_size = 8, .parts = 2});
  auto batch = loader.next();
  loader.set_epoch(1);
  COHORT_EXPECT_THROW_WITH(batch->advance(), UsageError, "the loader had advanced");
  EXPECT_EQ(loader.next()->indices[0], 0);
}

TEST(LoaderPartsTest, ASampleThatCannotBeReadBeginsItsBatchAnew) {
  class Once : public ExampleDataset {
   public:
    std::int64_t size() const override { return 12; }
    std::vector<at::Tensor> get(std::int64_t index, base::RandomStream&) const override {
      if (index == 6 && !failed_.exchange(true)) throw std::runtime_error("cannot decode");
      return {at::full({1}, float(index)), at::scalar_tensor(index, at::kLong)};
    }

   private:
    mutable std::atomic<bool> failed_{false};
  };
  for (const int workers : {0, 1}) {
    Loader loader(std::make_shared<Once>(), {.batch_size = 6, .parts = 3, .workers = workers});
    auto first = loader.next();
    while (first->advance()) continue;
    // Sample 6 is in the first part of the second batch, or is read ahead; whoever meets it says so.
    COHORT_EXPECT_THROW_WITH(loader.next(), DataError, "sample 6");
    auto again = loader.next();
    EXPECT_EQ(Whole(*again).indices, (std::vector<std::int64_t>{6, 7, 8, 9, 10, 11}));
    EXPECT_FALSE(loader.next());
  }
}

TEST(LoaderPartsTest, RejectsPartsWithSkippedSamplesAndNoParts) {
  COHORT_EXPECT_THROW_WITH(Loader(number_pairs(4), {.batch_size = 2, .parts = 0}), UsageError, "parts is 0");
  COHORT_EXPECT_THROW_WITH(Loader(number_pairs(4), {.batch_size = 2, .parts = 2, .on_error = OnError::kSkip}),
                           UsageError, "on_error: skip");
}

}  // namespace
}  // namespace cohort::data

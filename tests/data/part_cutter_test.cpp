// All orders, batches, shares and parts up to small sizes, against lists of samples.
#include "cohort/data/internal/part_cutter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

namespace cohort::data {
namespace {

using Samples = std::vector<std::int64_t>;
/// By the first position of the batch, and the share: its samples, part after part.
using Cut = std::map<std::pair<std::int64_t, std::int64_t>, std::vector<Samples>>;

/// What the parts of an order of `samples` hold. `world_size` shares, of which [first, first + count) are
/// cut.
Cut cut(const PartCutter::Options& options, std::int64_t samples, std::int64_t first, std::int64_t count) {
  PartCutter cutter(options);
  cutter.go_to(0, first, count);
  Cut found;
  bool begins_batch = true;
  std::int64_t batch = -1, share = -1;
  while (const std::optional<Part> part = cutter.next(samples)) {
    EXPECT_EQ(part->whole_first != batch, begins_batch);
    if (!begins_batch) {
      EXPECT_GE(part->share, share);
    }
    std::tie(batch, share, begins_batch) = std::tuple(part->whole_first, part->share, part->is_last);
    EXPECT_EQ(part->whole_next, std::min(samples, batch + options.global_batch));
    Samples positions;
    for (std::int64_t i = 0; i < part->count; ++i) {
      positions.push_back(part->first + part->share + options.world_size * i);
    }
    if (!positions.empty()) {
      EXPECT_LT(positions.back(), part->next);
    }
    found[{batch, share}].push_back(positions);
  }
  EXPECT_TRUE(begins_batch) << "the last batch was cut to its end";
  return found;
}

/// The same, from lists of each share's samples.
Cut expected_cut(const PartCutter::Options& options, std::int64_t samples, std::int64_t first,
                 std::int64_t count) {
  Cut expected;
  for (std::int64_t batch = 0; batch < samples; batch += options.global_batch) {
    const std::int64_t end = std::min(samples, batch + options.global_batch);
    if (options.drop_last && end - batch < options.global_batch) break;
    for (std::int64_t share = first; share < first + count; ++share) {
      Samples own;
      for (std::int64_t i = batch + share; i < end; i += options.world_size) own.push_back(i);
      if (own.empty() && share != first) continue;
      std::vector<Samples>& parts = expected[{batch, share}];
      for (std::size_t i = 0; i == 0 || i < own.size(); i += static_cast<std::size_t>(options.part_size)) {
        const std::size_t next = std::min(own.size(), i + static_cast<std::size_t>(options.part_size));
        parts.emplace_back(own.begin() + static_cast<std::ptrdiff_t>(i),
                           own.begin() + static_cast<std::ptrdiff_t>(next));
      }
    }
  }
  return expected;
}

TEST(PartCutterTest, PartsHoldWhatTheSharesOfEachBatchHold) {
  for (std::int64_t world = 1; world <= 4; ++world) {
    for (std::int64_t batch = 1; batch <= 9; ++batch) {
      for (std::int64_t part = 1; part <= 3; ++part) {
        for (const bool drop_last : {false, true}) {
          const PartCutter::Options options{
              .global_batch = batch, .part_size = part, .world_size = world, .drop_last = drop_last};
          for (std::int64_t samples = 1; samples <= 20; ++samples) {
            for (std::int64_t first = 0; first < world; ++first) {
              for (std::int64_t count = 1; count <= world - first; ++count) {
                ASSERT_EQ(cut(options, samples, first, count), expected_cut(options, samples, first, count))
                    << "world " << world << ", batch " << batch << ", part " << part << ", samples "
                    << samples << ", shares " << first << " to " << first + count - 1 << ", drop_last "
                    << drop_last;
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace cohort::data

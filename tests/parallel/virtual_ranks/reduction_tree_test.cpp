#include "cohort/parallel/virtual_ranks/internal/reduction_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

namespace cohort::parallel {
namespace {

/// The sum of a node as the definition says.
float naive_sum(std::span<const float> leaves, LeafRange node) {
  if (node.size() == 1) return leaves[static_cast<std::size_t>(node.begin)];
  const std::int64_t middle = split_of(node);
  return naive_sum(leaves, {node.begin, middle}) + naive_sum(leaves, {middle, node.end});
}

std::vector<LeafRange> leaves_of(LeafRange block) {
  std::vector<LeafRange> leaves;
  for (std::int64_t leaf = block.begin; leaf < block.end; ++leaf) leaves.push_back({leaf, leaf + 1});
  return leaves;
}

/// What is left on the stack when the sums of `nodes` came one after the other.
std::vector<float> fold(std::int64_t num_leaves, std::span<const LeafRange> nodes,
                        std::span<const float> sums, std::size_t* most = nullptr) {
  const std::vector<std::int64_t> merges = merges_after(num_leaves, nodes);
  std::vector<float> stack;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    stack.push_back(sums[i]);
    if (most != nullptr) *most = std::max(*most, stack.size());
    for (std::int64_t merge = 0; merge < merges[i]; ++merge) {
      const float upper = stack.back();
      stack.pop_back();
      stack.back() += upper;
    }
  }
  if (most != nullptr) {
    EXPECT_EQ(*most, stack_size(merges));
  }
  return stack;
}

/// Numbers whose sum depends on the order of additions.
std::vector<float> draw_leaves(std::mt19937& random, std::int64_t count) {
  std::uniform_real_distribution<float> mantissa(-1, 1);
  std::uniform_int_distribution<int> exponent(-12, 12);
  std::vector<float> leaves;
  for (std::int64_t leaf = 0; leaf < count; ++leaf) {
    leaves.push_back(std::ldexp(mantissa(random), exponent(random)));
  }
  return leaves;
}

std::size_t log2_up(std::int64_t value) {
  return static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(value - 1)));
}

TEST(ReductionTreeTest, TheFoldOfAnyBlockHasTheBitsOfTheDefinition) {
  std::mt19937 random(5);
  for (std::int64_t num_leaves = 1; num_leaves <= 17; ++num_leaves) {
    for (std::int64_t begin = 0; begin < num_leaves; ++begin) {
      for (std::int64_t end = begin + 1; end <= num_leaves; ++end) {
        const std::vector<float> all = draw_leaves(random, num_leaves);
        const LeafRange block{begin, end};
        const std::vector<LeafRange> cover = cover_of(num_leaves, block);
        std::size_t most = 0;
        const std::vector<float> found = fold(num_leaves, leaves_of(block),
                                              std::span(all).subspan(static_cast<std::size_t>(begin)), &most);
        ASSERT_EQ(found.size(), cover.size());
        for (std::size_t node = 0; node < cover.size(); ++node) {
          EXPECT_EQ(std::bit_cast<std::uint32_t>(found[node]),
                    std::bit_cast<std::uint32_t>(naive_sum(all, cover[node])))
              << num_leaves << " leaves, block " << begin << " to " << end << ", node " << node;
        }
        if (num_leaves > 1) {
          EXPECT_LE(cover.size(), 2 * log2_up(num_leaves));
        }
        EXPECT_LE(most, cover.size() + log2_up(num_leaves));
        if (cover.size() == 1) {
          EXPECT_LE(most, log2_up(end - begin) + 1);
        }
      }
    }
  }
}

TEST(ReductionTreeTest, AnyNumberOfProcessesAddsUpToTheSameBits) {
  std::mt19937 random(6);
  int differs_from_left_fold = 0, rounds = 0;
  for (std::int64_t num_leaves = 1; num_leaves <= 17; ++num_leaves) {
    const std::vector<float> all = draw_leaves(random, num_leaves);
    const float expected = naive_sum(all, {0, num_leaves});
    for (int num_processes = 1; num_processes <= num_leaves; ++num_processes) {
      std::vector<LeafRange> nodes;
      std::vector<float> sums;
      std::int64_t next = 0;
      for (int process = 0; process < num_processes; ++process) {
        const LeafRange block = block_of(process, num_processes, num_leaves);
        ASSERT_EQ(block.begin, next);
        ASSERT_GE(block.size(), 1);
        next = block.end;
        const std::vector<float> own =
            fold(num_leaves, leaves_of(block), std::span(all).subspan(static_cast<std::size_t>(block.begin)));
        const std::vector<LeafRange> cover = cover_of(num_leaves, block);
        nodes.insert(nodes.end(), cover.begin(), cover.end());
        sums.insert(sums.end(), own.begin(), own.end());
      }
      ASSERT_EQ(next, num_leaves);
      const std::vector<float> root = fold(num_leaves, nodes, sums);
      ASSERT_EQ(root.size(), 1U);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(root[0]), std::bit_cast<std::uint32_t>(expected))
          << num_leaves << " leaves, " << num_processes << " processes";
    }
    float left_fold = 0;
    for (const float leaf : all) left_fold += leaf;
    ++rounds;
    if (left_fold != expected) ++differs_from_left_fold;
  }
  EXPECT_GT(differs_from_left_fold, rounds / 3) << "these numbers would not show another order";
}

TEST(ReductionTreeTest, ANodeSplitsAfterTheLargerHalf) {
  EXPECT_EQ(split_of({0, 5}), 3);
  EXPECT_EQ(split_of({3, 5}), 4);
  EXPECT_EQ(cover_of(8, {4, 8}), (std::vector<LeafRange>{{4, 8}}));
  EXPECT_EQ(cover_of(8, {3, 6}), (std::vector<LeafRange>{{3, 4}, {4, 6}}));
  EXPECT_EQ(cover_of(5, {0, 5}), (std::vector<LeafRange>{{0, 5}}));
  EXPECT_EQ(merges_after(4, leaves_of({0, 4})), (std::vector<std::int64_t>{0, 1, 0, 2}));
  EXPECT_EQ(block_of(1, 3, 8), (LeafRange{2, 5}));
}

}  // namespace
}  // namespace cohort::parallel

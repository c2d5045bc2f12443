#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// The fixed binary tree in whose order the gradients of virtual ranks are added. Plain arithmetic.
///
/// The node over [b, e) with more than one leaf has the children [b, m) and [m, e), m = b + ceil((e - b) /
/// 2). The root is over all leaves. The shape depends on the number of leaves alone. So whoever adds both
/// children of a node gets the bits that any other process gets.
namespace cohort::parallel {

/// Leaves [begin, end): a node of the tree, or what a process has of it.
struct LeafRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  constexpr std::int64_t size() const { return end - begin; }
  bool operator==(const LeafRange&) const = default;
};

/// Returns the leaves of process `process`: [p V / W, (p + 1) V / W), rounded down.
LeafRange block_of(int process, int num_processes, std::int64_t num_leaves);

/// Returns the first leaf of the right child of a node with several leaves.
constexpr std::int64_t split_of(LeafRange node) {
  return node.begin + (node.size() + 1) / 2;
}

/// Returns the cover of `block`: the largest nodes whose leaves it has, in order.
std::vector<LeafRange> cover_of(std::int64_t num_leaves, LeafRange block);

/// The sums of `nodes`, which are nodes of the tree that follow one another, come one after the other and are
/// pushed on a stack. Returns for each how often the two topmost sums are then added, the upper one to the
/// lower one. At the end the stack holds the cover of all leaves that the nodes have.
std::vector<std::int64_t> merges_after(std::int64_t num_leaves, std::span<const LeafRange> nodes);

/// Returns the most sums that the stack holds at once.
std::size_t stack_size(std::span<const std::int64_t> merges);

}  // namespace cohort::parallel

#include "cohort/parallel/virtual_ranks/internal/reduction_tree.h"

#include <algorithm>

namespace cohort::parallel {
namespace {

void append_cover(LeafRange node, LeafRange block, std::vector<LeafRange>& cover) {
  if (node.end <= block.begin || node.begin >= block.end) return;
  if (block.begin <= node.begin && node.end <= block.end) return cover.push_back(node);
  const std::int64_t middle = split_of(node);
  append_cover({node.begin, middle}, block, cover);
  append_cover({middle, node.end}, block, cover);
}

/// Goes through the tree in the order in which its sums are there.
class MergeWalk {
 public:
  explicit MergeWalk(std::span<const LeafRange> nodes) : nodes_(nodes), merges_(nodes.size(), 0) {}

  /// Returns whether the sum of `node` is there afterwards.
  bool visit(LeafRange node) {
    if (next_ == nodes_.size() || nodes_[next_].begin >= node.end) return false;
    if (nodes_[next_] == node) {
      ++next_;
      return true;
    }
    if (node.size() == 1) return false;
    const std::int64_t middle = split_of(node);
    const bool has_left = visit({node.begin, middle}), has_right = visit({middle, node.end});
    if (!has_left || !has_right) return false;
    ++merges_[next_ - 1];
    return true;
  }
  std::vector<std::int64_t> take() { return std::move(merges_); }

 private:
  std::span<const LeafRange> nodes_;
  std::size_t next_ = 0;
  std::vector<std::int64_t> merges_;
};

}  // namespace

LeafRange block_of(int process, int num_processes, std::int64_t num_leaves) {
  return {process * num_leaves / num_processes, (process + 1) * num_leaves / num_processes};
}

std::vector<LeafRange> cover_of(std::int64_t num_leaves, LeafRange block) {
  std::vector<LeafRange> cover;
  append_cover({0, num_leaves}, block, cover);
  return cover;
}

std::vector<std::int64_t> merges_after(std::int64_t num_leaves, std::span<const LeafRange> nodes) {
  MergeWalk walk(nodes);
  walk.visit({0, num_leaves});
  return walk.take();
}

std::size_t stack_size(std::span<const std::int64_t> merges) {
  std::int64_t size = 0, most = 0;
  for (const std::int64_t count : merges) {
    most = std::max(most, ++size);
    size -= count;
  }
  return static_cast<std::size_t>(most);
}

}  // namespace cohort::parallel

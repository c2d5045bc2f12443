#include "cohort/net/internal/free_ranges.h"

#include <algorithm>
#include <iterator>

namespace cohort::net {

void FreeRanges::RangeSet::add(Range range) {
  by_offset_[range.offset] = range.size;
  by_size_.emplace(range.size, range.offset);
  bytes_ += range.size;
}

void FreeRanges::RangeSet::remove(Range range) {
  by_offset_.erase(range.offset);
  by_size_.erase({range.size, range.offset});
  bytes_ -= range.size;
}

void FreeRanges::RangeSet::insert(Range range) {
  if (range.size == 0) return;
  const auto after = by_offset_.find(range.offset + range.size);
  if (after != by_offset_.end()) {
    const Range next{after->first, after->second};
    remove(next);
    range.size += next.size;
  }
  const auto at = by_offset_.lower_bound(range.offset);
  if (at != by_offset_.begin()) {
    const Range before{std::prev(at)->first, std::prev(at)->second};
    if (before.offset + before.size == range.offset) {
      remove(before);
      range = {before.offset, before.size + range.size};
    }
  }
  add(range);
}

std::optional<Range> FreeRanges::RangeSet::take(std::uint64_t size) {
  const auto found = by_size_.lower_bound({size, 0});
  if (found == by_size_.end()) return std::nullopt;
  const Range range{found->second, found->first};
  remove(range);
  if (range.size > size) add({range.offset + size, range.size - size});
  return Range{range.offset, size};
}

// From its end, so that a part which is used again and again keeps its beginning.
Range FreeRanges::RangeSet::take_longest(std::uint64_t most) {
  const auto [size, offset] = *by_size_.rbegin();
  remove({offset, size});
  const std::uint64_t taken = std::min(size, most);
  if (taken < size) add({offset, size - taken});
  return {offset + size - taken, taken};
}

std::vector<Range> FreeRanges::take_warm_above(std::uint64_t most) {
  std::vector<Range> taken;
  while (warm_.bytes() > most) taken.push_back(warm_.take_longest(warm_.bytes() - most));
  return taken;
}

}  // namespace cohort::net

#include "cohort/data/internal/part_cutter.h"

#include <algorithm>

namespace cohort::data {

void PartCutter::go_to(std::int64_t position, std::int64_t first, std::int64_t count) {
  first_share_ = first;
  end_share_ = share_ = first + count;
  position_ = whole_first_ = whole_next_ = position;
}

std::int64_t PartCutter::samples_of(std::int64_t share, std::int64_t taken) const {
  return (taken - share + options_.world_size - 1) / options_.world_size;
}

std::optional<Part> PartCutter::next(std::int64_t samples) {
  if (share_ == end_share_) {
    const std::int64_t left = samples - whole_next_;
    if (left <= 0 || (options_.drop_last && left < options_.global_batch)) return std::nullopt;
    position_ = whole_first_ = whole_next_;
    whole_next_ += std::min(left, options_.global_batch);
    share_ = first_share_;
  }
  // Whole rounds over the shares, so that parts hold what the batch holds.
  const std::int64_t taken = std::min(whole_next_ - position_, options_.part_size * options_.world_size);
  Part part{.share = share_,
            .first = position_,
            .next = position_ + taken,
            .whole_first = whole_first_,
            .whole_next = whole_next_,
            .count = samples_of(share_, taken)};
  position_ = part.next;
  if (samples_of(share_, whole_next_ - position_) == 0) {
    ++share_;
    position_ = whole_first_;
    // A share has at most as many samples as the share before it.
    if (samples_of(share_, whole_next_ - whole_first_) == 0) share_ = end_share_;
  }
  part.is_last = share_ == end_share_;
  return part;
}

}  // namespace cohort::data

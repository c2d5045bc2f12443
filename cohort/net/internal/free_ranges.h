#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace cohort::net {

/// A part of a long memory.
struct Range {
  std::uint64_t offset = 0, size = 0;
  bool operator==(const Range&) const = default;
};

/// The free parts of a long memory: warm ones, which have pages, and cold ones, which have none. Neighbours
/// of one kind are one part. Touches no memory. Threads: one at a time.
class FreeRanges {
 public:
  /// All of it is cold.
  explicit FreeRanges(Range all) { cold_.insert(all); }

  /// The shortest part that is long enough, of which the beginning is taken. Empty where none is.
  std::optional<Range> take_warm(std::uint64_t size) { return warm_.take(size); }
  std::optional<Range> take_cold(std::uint64_t size) { return cold_.take(size); }
  void give_warm(Range range) { warm_.insert(range); }
  void give_cold(Range range) { cold_.insert(range); }
  /// Takes warm parts, the longest first, until at most `most` bytes are warm: whoever takes the pages away
  /// gives them back as cold.
  std::vector<Range> take_warm_above(std::uint64_t most);

  std::uint64_t warm_bytes() const { return warm_.bytes(); }
  std::uint64_t cold_bytes() const { return cold_.bytes(); }

 private:
  class RangeSet {
   public:
    void insert(Range range);
    std::optional<Range> take(std::uint64_t size);
    Range take_longest(std::uint64_t most);
    std::uint64_t bytes() const { return bytes_; }

   private:
    void add(Range range);
    void remove(Range range);

    std::map<std::uint64_t, std::uint64_t> by_offset_;
    std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  // size, offset
    std::uint64_t bytes_ = 0;
  };

  RangeSet warm_, cold_;
};

}  // namespace cohort::net

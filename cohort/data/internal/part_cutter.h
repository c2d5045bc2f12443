#pragma once

#include <cstdint>
#include <optional>

namespace cohort::data {

/// What a loader hands out at once: samples of one share of one batch. Positions are in the order of an
/// epoch, over all shares.
struct Part {
  std::int64_t share = 0;
  /// The share's samples between `first` and `next`: first + share, and from there every world_size-th.
  std::int64_t first = 0;
  std::int64_t next = 0;
  /// The whole batch, over all shares and parts.
  std::int64_t whole_first = 0;
  std::int64_t whole_next = 0;
  /// Samples in this part.
  std::int64_t count = 0;
  /// Whether no part of this batch follows for this loader.
  bool is_last = true;
};

/// Cuts the order of an epoch into batches, a batch into shares, and a share into parts. Plain arithmetic.
class PartCutter {
 public:
  struct Options {
    std::int64_t global_batch = 1;  ///< samples of a batch over all shares
    std::int64_t part_size = 1;     ///< samples of a share in a part
    std::int64_t world_size = 1;    ///< shares of a batch, over all loaders
    bool drop_last = false;
  };
  explicit PartCutter(Options options) : options_(options) {}

  /// Cuts the shares [first, first + count) from here on. The next part begins a batch at `position`.
  void go_to(std::int64_t position, std::int64_t first, std::int64_t count);
  /// Returns the next part of an order of `samples`, share after share; nothing at its end. Shares without a
  /// sample have no part, but for the first share where all are empty.
  std::optional<Part> next(std::int64_t samples);

  /// Samples of `share` among `taken` of the order, which follow one another.
  std::int64_t samples_of(std::int64_t share, std::int64_t taken) const;

 private:
  Options options_;
  std::int64_t first_share_ = 0, end_share_ = 1;
  std::int64_t share_ = 1;  // end_share_: the batch is cut
  std::int64_t position_ = 0;
  std::int64_t whole_first_ = 0, whole_next_ = 0;
};

}  // namespace cohort::data

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

/// Which gradients travel together. Plain arithmetic, without tensors.
namespace cohort::parallel {

/// A gradient, in the order of arrival.
struct BucketItem {
  std::int64_t bytes = 0;
  std::string kind;  ///< type and device: only equal ones share a bucket
  double ready = 0;  ///< seconds after backward began
};

/// Items of each bucket by their place in the order of arrival, in the order in which the buckets are
/// reduced: that in which they are complete.
using BucketList = std::vector<std::vector<std::size_t>>;

/// Returns buckets of at most `cap_bytes`, but for an item that is larger alone; the one that is complete
/// last holds at most `first_bytes`, since nothing hides it.
/// Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3.
BucketList fill_buckets(std::span<const BucketItem> items, std::int64_t first_bytes, std::int64_t cap_bytes);

/// What one reduction takes: latency + bytes * seconds_per_byte.
struct LinkCost {
  double latency = 0;  ///< seconds
  double seconds_per_byte = 0;
};

/// When the last of `buckets` is reduced, in seconds after backward began, if one goes after the other.
double finish_time(std::span<const BucketItem> items, const BucketList& buckets, const LinkCost& link);

/// Returns the buckets with the earliest finish_time() of all cuts of the order of arrival, by dynamic
/// programming over the cuts; of several with the same time one with few buckets. Where there are several
/// kinds each is cut as if it had the link alone. Time: O(n^2).
BucketList plan_buckets(std::span<const BucketItem> items, const LinkCost& link);

}  // namespace cohort::parallel

// fill_buckets() goes from the last gradient to the first, so that the small bucket is the bucket that
// nothing hides. plan_buckets() finds, for each number of first gradients, the earliest time at which they
// can be reduced. It tries every start of the last bucket, and adds the bucket's cost to when its gradients
// and the link are ready. A bucket holds gradients of the same kind in the order of arrival, and buckets are
// sorted by their last gradient.
#include "cohort/parallel/internal/buckets.h"

#include <algorithm>
#include <limits>
#include <map>

namespace cohort::parallel {
namespace {

// Buckets in the order in which their last items come.
void sort_by_completion(BucketList& buckets) {
  for (auto& bucket : buckets) std::ranges::sort(bucket);
  std::ranges::sort(buckets, {}, [](const std::vector<std::size_t>& bucket) { return bucket.back(); });
}

std::map<std::string, std::vector<std::size_t>> by_kind(std::span<const BucketItem> items) {
  std::map<std::string, std::vector<std::size_t>> places;
  for (std::size_t i = 0; i < items.size(); ++i) places[items[i].kind].push_back(i);
  return places;
}

// Cuts items of one kind. earliest[j]: when the first j of them can be reduced.
void plan_kind(std::span<const BucketItem> items, const std::vector<std::size_t>& places,
               const LinkCost& link, BucketList& buckets) {
  const std::size_t count = places.size();
  std::vector<double> earliest(count + 1, std::numeric_limits<double>::infinity());
  std::vector<double> bytes(count + 1, 0);
  std::vector<std::size_t> begins(count + 1, 0);
  earliest[0] = 0;
  double ready = 0;
  for (std::size_t end = 1; end <= count; ++end) {
    const BucketItem& last = items[places[end - 1]];
    bytes[end] = bytes[end - 1] + static_cast<double>(last.bytes);
    ready = std::max(ready, last.ready);
    for (std::size_t begin = 0; begin < end; ++begin) {
      const double time = std::max(earliest[begin], ready) + link.latency +
                          (bytes[end] - bytes[begin]) * link.seconds_per_byte;
      // A later cut that wins nothing to speak of is a bucket too many.
      if (time < earliest[end] * (1 - 1e-9)) {
        earliest[end] = time;
        begins[end] = begin;
      }
    }
  }
  for (std::size_t end = count; end > 0; end = begins[end]) {
    buckets.emplace_back(places.begin() + static_cast<std::ptrdiff_t>(begins[end]),
                         places.begin() + static_cast<std::ptrdiff_t>(end));
  }
}

}  // namespace

BucketList fill_buckets(std::span<const BucketItem> items, std::int64_t first_bytes, std::int64_t cap_bytes) {
  BucketList buckets;
  for (const auto& [kind, places] : by_kind(items)) {
    std::vector<std::size_t> bucket;
    std::int64_t bytes = 0;
    std::int64_t limit = first_bytes;
    const auto close = [&] {
      if (!bucket.empty()) buckets.push_back(std::move(bucket));
      bucket.clear();
      bytes = 0;
      limit = cap_bytes;
    };
    for (std::size_t i = places.size(); i-- > 0;) {  // from the one that comes last
      if (bytes + items[places[i]].bytes > limit) close();
      bucket.push_back(places[i]);
      bytes += items[places[i]].bytes;
    }
    close();
  }
  sort_by_completion(buckets);
  return buckets;
}

double finish_time(std::span<const BucketItem> items, const BucketList& buckets, const LinkCost& link) {
  double time = 0;
  for (const auto& bucket : buckets) {
    double ready = 0, bytes = 0;
    for (const std::size_t i : bucket) {
      ready = std::max(ready, items[i].ready);
      bytes += static_cast<double>(items[i].bytes);
    }
    time = std::max(time, ready) + link.latency + bytes * link.seconds_per_byte;
  }
  return time;
}

BucketList plan_buckets(std::span<const BucketItem> items, const LinkCost& link) {
  BucketList buckets;
  for (const auto& [kind, places] : by_kind(items)) plan_kind(items, places, link, buckets);
  sort_by_completion(buckets);
  return buckets;
}

}  // namespace cohort::parallel

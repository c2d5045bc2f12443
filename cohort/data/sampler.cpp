// An order is computed anew from size, seed and epoch, with a generator of its own, so a sampler has no state
// to save. A shuffled order is at::randperm's, which makes it the permutation that PyTorch gets from the same
// seed. A distributed order is padded from its own start, or cut; its ranks take every world-th sample of it.
#include "cohort/data/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>

#include <numeric>
#include <string>

#include "cohort/base/error.h"

namespace cohort::data {
namespace {

std::int64_t checked_size(std::int64_t size) {
  if (size >= 0) return size;
  throw UsageError("data.sampler", base::concat("size is ", size, ", expected at least 0"));
}

std::vector<std::int64_t> identity(std::int64_t size) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// torch.randperm(size, generator=g) after g.manual_seed(seed + epoch).
std::vector<std::int64_t> permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch) {
  const auto generator = at::detail::createCPUGenerator(seed + static_cast<std::uint64_t>(epoch));
  const at::Tensor order = at::randperm(size, generator, at::TensorOptions().dtype(at::kLong));
  const auto* first = order.const_data_ptr<std::int64_t>();
  return {first, first + size};
}

std::int64_t total_size(std::int64_t size, const DistributedSamplerOptions& options) {
  const std::int64_t world = options.world_size;
  if (world < 1)
    throw UsageError("data.sampler", base::concat("world_size is ", world, ", expected at least 1"));
  switch (options.last_batch) {
    case LastBatchPolicy::kPad:
      return (size + world - 1) / world * world;
    case LastBatchPolicy::kDrop:
      return size / world * world;
    case LastBatchPolicy::kKeep:
      break;
  }
  return size;
}

}  // namespace

SequentialSampler::SequentialSampler(std::int64_t size) : size_(checked_size(size)) {}

std::vector<std::int64_t> SequentialSampler::order(std::int64_t) const {
  return identity(size_);
}

RandomSampler::RandomSampler(std::int64_t size, std::uint64_t seed)
    : size_(checked_size(size)), seed_(seed) {}

std::vector<std::int64_t> RandomSampler::order(std::int64_t epoch) const {
  return permutation(size_, seed_, epoch);
}

DistributedSampler::DistributedSampler(std::int64_t size, DistributedSamplerOptions options)
    : size_(checked_size(size)), total_(total_size(size, options)), options_(options) {}

std::vector<std::int64_t> DistributedSampler::order(std::int64_t epoch) const {
  std::vector<std::int64_t> order =
      options_.shuffle ? permutation(size_, options_.seed, epoch) : identity(size_);
  order.reserve(static_cast<std::size_t>(total_));
  // Padding starts the order again, more than once where there are more ranks than samples.
  if (size_ > 0) {
    for (std::size_t i = 0; order.size() < static_cast<std::size_t>(total_); ++i) order.push_back(order[i]);
  }
  order.resize(static_cast<std::size_t>(total_));
  return order;
}

std::vector<std::int64_t> DistributedSampler::share(std::int64_t epoch, std::int64_t rank) const {
  if (rank < 0 || rank >= options_.world_size) {
    throw UsageError("data.sampler",
                     base::concat("rank is ", rank, ", expected 0 to ", options_.world_size - 1));
  }
  const std::vector<std::int64_t> all = order(epoch);
  std::vector<std::int64_t> share;
  // Interleaved, as PyTorch's DistributedSampler: a global batch is a range of the order, whatever the number
  // of ranks.
  for (auto i = static_cast<std::size_t>(rank); i < all.size();
       i += static_cast<std::size_t>(options_.world_size)) {
    share.push_back(all[i]);
  }
  return share;
}

}  // namespace cohort::data

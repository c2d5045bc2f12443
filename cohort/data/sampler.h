#pragma once

#include <cstdint>
#include <vector>

/// Samplers: in which order a dataset's samples are read in an epoch.
///
/// There is one global order per (seed, epoch), whatever the number of ranks (up to the padding at its end);
/// rank r takes every world-th sample of it, hence of each global batch.
namespace cohort::data {

/// What to do when the dataset does not divide by the number of ranks.
enum class LastBatchPolicy {
  kPad,   ///< Repeat samples from the start of the order: PyTorch's DistributedSampler.
  kDrop,  ///< Leave the last ones out: PyTorch's DistributedSampler(drop_last=True).
  kKeep,  ///< Every sample exactly once; the first ranks get one more. For evaluation.
};

/// A pure function from the epoch to the global order.
class Sampler {
 public:
  virtual ~Sampler() = default;
  /// Length of every order, over all ranks.
  virtual std::int64_t size() const = 0;
  /// Dataset indices in the order of epoch `epoch`, over all ranks: size() of them, each 0 .. samples - 1.
  /// The loader checks both.
  virtual std::vector<std::int64_t> order(std::int64_t epoch) const = 0;
};

/// 0, 1, ..., size - 1: PyTorch's SequentialSampler.
class SequentialSampler : public Sampler {
 public:
  explicit SequentialSampler(std::int64_t size);
  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> order(std::int64_t epoch) const override;

 private:
  std::int64_t size_;
};

/// A permutation per epoch: that of PyTorch's RandomSampler(generator=g) after g.manual_seed(seed + epoch).
class RandomSampler : public Sampler {
 public:
  RandomSampler(std::int64_t size, std::uint64_t seed);
  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> order(std::int64_t epoch) const override;

 private:
  std::int64_t size_;
  std::uint64_t seed_;
};

/// What a DistributedSampler deals out.
struct DistributedSamplerOptions {
  std::int64_t world_size = 1;
  bool shuffle = true;
  std::uint64_t seed = 0;
  LastBatchPolicy last_batch = LastBatchPolicy::kPad;
};

/// The order that PyTorch's DistributedSampler(seed) deals out after set_epoch(epoch).
class DistributedSampler : public Sampler {
 public:
  DistributedSampler(std::int64_t size, DistributedSamplerOptions options);
  std::int64_t size() const override { return total_; }
  std::vector<std::int64_t> order(std::int64_t epoch) const override;
  /// What PyTorch's sampler of rank `rank` yields.
  std::vector<std::int64_t> share(std::int64_t epoch, std::int64_t rank) const;

 private:
  std::int64_t size_;
  std::int64_t total_;
  DistributedSamplerOptions options_;
};

}  // namespace cohort::data

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

/// The memory in which gradients of virtual ranks are added. Internal to VirtualRankSync.
namespace cohort::parallel {

/// Gradients of some parameters, flat, in buckets that the parameters alone decide. A slot holds one partial
/// sum of all gradients. Slots are made when they are first used, and kept.
///
/// Half precision is added in float32, every other type in its own.
/// Ownership: shares the parameters. Threads: one caller at a time.
class FlatGradients {
 public:
  /// Returns a flat tensor that is not initialised.
  using Allocate = std::function<at::Tensor(std::int64_t numel, const at::TensorOptions& options)>;
  /// `bucket_bytes`: most of a bucket, but for a parameter that is larger alone. `padding`: numbers that each
  /// flat tensor has beyond its gradients; they are 0.
  FlatGradients(std::vector<at::Tensor> parameters, std::int64_t bucket_bytes, std::int64_t padding,
                Allocate allocate);

  std::size_t num_buckets() const { return buckets_.size(); }
  std::int64_t numel(std::size_t bucket) const { return buckets_[bucket].numel; }
  /// Bytes of one number of a bucket's sums, and of its flat tensor.
  std::int64_t sum_itemsize(std::size_t bucket) const;
  std::int64_t slot_bytes(std::size_t bucket) const {
    return (buckets_[bucket].numel + padding_) * sum_itemsize(bucket);
  }
  /// Bytes of all gradients.
  std::int64_t bytes() const;
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  /// Returns the flat tensor of `bucket` in `slot`, [numel + padding].
  const at::Tensor& flat(std::size_t bucket, std::size_t slot);

  /// The bucket of each parameter.
  std::size_t bucket_of(std::size_t parameter) const { return bucket_of_[parameter]; }
  /// Parameters of a bucket.
  std::size_t num_parameters(std::size_t bucket) const { return buckets_[bucket].parameters.size(); }

  /// Writes each gradient of a bucket times `weight` to `slot`; zeros where there is no gradient, or for a
  /// weight of 0. Sets flags[i] where parameter i has one. The parameters have no gradient afterwards.
  /// Throws: UsageError for a sparse gradient.
  void take_leaf(std::size_t bucket, std::size_t slot, double weight, std::vector<std::uint8_t>& flags);
  /// slot += the slot after it.
  void add_next(std::size_t bucket, std::size_t slot);
  /// The parameters have no gradient afterwards.
  void clear_gradients();
  /// Slots are made anew when they are used. Gradients of parameters keep those that they lie in.
  void release_memory();
  /// Whether a parameter has a gradient.
  bool has_gradients() const;
  /// Makes what is in slot 0 the gradients of the parameters whose flag is set. They lie in the slot until
  /// the next leaf is written.
  void set_gradients(const std::vector<std::uint8_t>& flags);

 private:
  struct Slot {
    at::Tensor flat;
    std::vector<at::Tensor> views;  // shaped and strided as the bucket's parameters
  };
  struct Bucket {
    std::vector<std::size_t> parameters;
    std::int64_t numel = 0;
    std::vector<Slot> slots;
  };
  Slot& slot_of(Bucket& bucket, std::size_t slot);

  std::vector<at::Tensor> parameters_;
  const std::int64_t padding_;
  const Allocate allocate_;
  std::vector<Bucket> buckets_;
  std::vector<std::size_t> bucket_of_;
};

}  // namespace cohort::parallel

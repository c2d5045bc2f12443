#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cohort/comm/group.h"
#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/internal/buckets.h"
#include "cohort/parallel/parameters.h"
#include "cohort/parallel/reducer_options.h"

/// The memory that gradients travel in, and how it is grouped. Internal to Reducer.
namespace cohort::parallel {

/// One gradient: where it lies in its bucket, and what this step knows of it.
struct Gradient {
  std::string name;
  at::Tensor parameter;
  bool is_sparse = false;  ///< in no bucket
  std::size_t bucket = 0;
  /// Of the bucket's memory, shaped and strided as the parameter; none while that has none. Of a sparse one:
  /// the sum over ranks, until scatter_to_grads().
  at::Tensor view;
  int expected = 1;             ///< times it comes in a backward: more, or none, where the graph is static
  int missing = 1;              ///< of these, in this backward
  bool has_arrived = false;     ///< backward has come to it, also where it brought no gradient
  bool is_used = false;         ///< a gradient came
  bool is_accumulated = false;  ///< came in backwards before that were not reduced
  double ready = 0;             ///< seconds after prepare(), summed over measured backwards
};

/// Ownership: the buckets' memory, but for buckets in place; with one rank there is none, gradients stay
/// where they are. Collective: constructor, regroup(). Threads: one caller at a time.
class GradientBuckets {
 public:
  struct Bucket {
    std::vector<std::size_t> gradients;
    at::Tensor flat;
    /// Of one gradient, which is reduced in the memory that autograd gave it where that is possible: `flat`
    /// is that memory, from put() to scatter_to_grads().
    bool in_place = false;
    std::size_t missing = 0;  ///< gradients that are not in it yet
    std::unique_ptr<Reduction> reduction;
  };

  GradientBuckets(comm::Group group, std::vector<NamedParameter> parameters, const ReducerOptions& options);

  std::vector<Gradient> gradients;  ///< in reverse order of definition
  std::vector<Bucket> buckets;      ///< in the order of reduction

  bool is_distributed() const { return group_.size() > 1; }
  /// Computes the scaled sums over ranks of the sparse gradients.
  void reduce_sparse_ones(double scale);
  /// A backward begins.
  void begin_backward();
  /// Notes that a gradient came, `seconds` after prepare().
  void record_ready(std::size_t index, double seconds);
  /// Notes that a backward was reduced.
  void note_backward() { ++backwards_; }
  /// Groups anew after the first backward, and again after kEndMeasured. No gradient may be under way.
  void regroup();

  /// Brings a gradient into its bucket, scaled; zeros where there is none. `owners`: how many tensors share
  /// its memory if nobody else will read it.
  void put(Gradient& gradient, double scale, std::size_t owners);
  /// Begins the reduction of a bucket.
  void launch(std::size_t index);
  /// Blocks until all that were launched are reduced.
  void wait_for_all();
  /// Makes what is in the buckets the gradients, but for those that no rank used: 0 in `used`, where it is
  /// defined. Adds up bytes and norm.
  void scatter_to_grads(const at::Tensor& used, ReduceReport& report);
  std::vector<std::vector<std::string>> names() const;

 private:
  std::vector<std::size_t> dense_ones() const;
  BucketList own_buckets() const;
  void make_buckets(const BucketList& lists);
  void give_memory(Bucket& bucket);
  std::vector<BucketItem> items_in(const std::vector<std::size_t>& order) const;
  BucketList by_size(const std::vector<std::size_t>& order) const;
  BucketList of_rank_0(const BucketList& lists) const;
  BucketList plan() const;
  LinkCost measure_link() const;

  const comm::Group group_;
  const ReducerOptions options_;
  std::vector<std::size_t> arrivals_;  // of the first backward that is reduced
  std::int64_t backwards_ = 0;
  enum class Grouped { kByDefinition, kByArrival, kByPlan } grouped_ = Grouped::kByDefinition;
};

}  // namespace cohort::parallel

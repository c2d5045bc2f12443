#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/step_info.h"

namespace cohort::parallel {

/// How gradients are grouped into buckets.
enum class BucketPlan {
  kDefinition,  ///< parameters in the reverse order of their definition
  kArrival,     ///< from the second backward on, in the order in which gradients came
  kMeasured,    ///< and after 18, on the CPU, sized by when they came and by what a reduction was measured to
                ///< take
};

/// How a Reducer groups gradients, and how it sends them.
struct ReducerOptions {
  /// Of the bucket that is complete last, which nothing hides.
  std::int64_t first_bucket_bytes = std::int64_t{1} << 20;
  /// Of the others; a gradient that is larger goes alone.
  std::int64_t bucket_cap_bytes = std::int64_t{25} << 20;
  /// In what groups gradients travel.
  BucketPlan plan = BucketPlan::kMeasured;
  /// Own buckets, by parameters' names, in the order of reduction: these stay as they are.
  std::vector<std::vector<std::string>> buckets = {};
  /// Parameters may have no gradient, each time others: those that neither prepare()'s outputs reach nor the
  /// backward are taken as ready at once, and what is left out by finish(). What no rank used, in this
  /// backward or in those under NoSync before, keeps the gradient that it had.
  bool find_unused_parameters = false;
  /// Every backward is like the first: gradients may come several times in it, or not at all.
  bool static_graph = false;
  /// Gradients are views of the buckets. Off: copies, which cost their memory again.
  bool gradient_as_bucket_view = true;
  /// Off: nothing is reduced before backward is over.
  bool overlap = true;
  /// Computes the norm of all reduced gradients in passing: ReduceReport::norm.
  bool norm = false;
  /// What is done with a bucket; all_reduce_hook() if empty. A hook may have state: it is for one Reducer.
  CommHook hook = {};
  /// In place of `hook`, for several Reducers: each makes its own. A gradient sync has one per optimizer.
  CommHookFactory make_hook = {};
  /// Of each collective; 0 is the group's.
  std::chrono::milliseconds timeout{0};
};

/// What one reduction did, and what it cost this rank.
struct ReduceReport : AverageReport {
  std::chrono::nanoseconds exposed{0};  ///< waited for reductions after the last gradient
  std::optional<double> norm;  ///< where ReducerOptions::norm asks for it: of all gradients as one vector
};

}  // namespace cohort::parallel

#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace cohort::optim {

/// Runs the operators of this thread in a narrower dtype where that is safe, until the end of the scope:
///
///     {
///       cohort::optim::Autocast autocast(at::kCPU, at::kBFloat16);
///       loss = criterion(model->forward(input), target);
///     }
///     loss.backward();  // outside: backward runs in the dtypes that forward chose
///
/// Guards nest, in stack order; leaving one restores what was before, also when an exception leaves the
/// scope. The outermost guard drops the cached casts of parameters, so the next step casts the updated ones.
///
/// `cache_enabled`: a parameter is cast once in a scope, and not at each use. Its gradients of all uses are
/// then added up in the narrow dtype. LibTorch has one cache for the process, so Cohort gives it to one
/// thread: the first that asks, until this thread ends. Scopes of other threads cast at each use. Give false
/// where several threads train, and all have the same bits. A scope within one without cache has none.
/// Threads: affects the thread that made it; destroy it there.
/// Throws: UsageError for a dtype that is neither bfloat16 nor half.
class Autocast {
 public:
  Autocast(c10::DeviceType device, c10::ScalarType dtype, bool enabled = true, bool cache_enabled = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_;
  c10::ScalarType previous_dtype_;
  bool previous_enabled_;
  bool previous_cache_enabled_;
};

}  // namespace cohort::optim

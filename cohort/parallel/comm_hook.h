#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "cohort/comm/group.h"

namespace c10 {
namespace ivalue {
struct Future;  // <ATen/core/ivalue.h>
}
}  // namespace c10
namespace c10d {
class GradBucket;  // <torch/csrc/distributed/c10d/comm.hpp>
}

/// What happens to a bucket of gradients between the ranks: docs/guide/distributed.md, "Communication hooks".
namespace cohort::parallel {

/// A bucket on its way.
class Reduction {
 public:
  virtual ~Reduction() = default;
  /// Blocks until what was begun is over, and begins the next collective, if the bucket needs one.
  /// Returns whether it does; after false the bucket holds the result. Called on every rank for the same
  /// buckets in the same order, so that collectives that it begins meet.
  virtual bool advance() = 0;
};

/// What a hook is given.
struct HookBucket {
  c10d::GradBucket& bucket;           ///< its buffer: a flat [n], to be made the sum over ranks, in place
  const comm::Group& group;           ///< for the hook's own collectives
  std::chrono::milliseconds timeout;  ///< of each collective; 0 is the group's
};

/// Begins the way of a bucket; on every rank for the same buckets in the same order. The numbers are scaled
/// so that their sum over ranks is the mean of the gradients.
using CommHook = std::function<std::unique_ptr<Reduction>(const HookBucket& bucket)>;

/// The sum of `flat`, in place, in its own type: what is done without a hook.
std::unique_ptr<Reduction> all_reduce(const comm::Group& group, const at::Tensor& flat,
                                      std::chrono::milliseconds timeout);
/// all_reduce() as a hook.
CommHook all_reduce_hook();
/// The sum of numbers rounded to Half or BFloat16, so half the bytes travel. Half overflows above 65504.
CommHook fp16_compress_hook();
/// The same with BFloat16, whose range is that of float32, with fewer digits than Half.
CommHook bf16_compress_hook();

/// What is written for c10d: takes a bucket whose buffer holds this rank's gradient, and returns a future of
/// the mean over ranks, a tensor or a list of one, which may be the buffer.
using FutureHook = std::function<c10::intrusive_ptr<c10::ivalue::Future>(c10d::GradBucket& bucket)>;
/// Threads: what the future runs, it runs on a thread of the backend; a collective that is begun there meets
/// those of other buckets in no fixed order, so it needs a group of its own.
CommHook future_hook(FutureHook hook);

}  // namespace cohort::parallel

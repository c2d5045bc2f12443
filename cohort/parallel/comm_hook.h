#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "cohort/base/registry.h"
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

/// Makes a hook, with state of its own if it has any. It is called once for each Reducer.
using CommHookFactory = std::function<CommHook()>;

/// Returns the hook of that name: "none" (an empty one: the sum in its own type), "fp16", "bf16", or a
/// registered one. Throws: UsageError for an unknown name, naming the nearest and all, or for one that two
/// libraries registered.
CommHook make_comm_hook(const std::string& name);

/// Throws: UsageError for a hook that make_comm_hook() does not find. The factory is not called.
void check_comm_hook_name(const std::string& name);

/// Makes `factory` known as `name`. Throws: UsageError if the name is taken or empty. Threads: any.
void register_comm_hook(const std::string& name, CommHookFactory factory);

/// What COHORT_REGISTER_COMM_HOOK calls while a library loads: a name that is taken stays with the first, and
/// make_comm_hook throws, naming both places.
bool register_comm_hook_at_load(const char* name, CommHookFactory factory, const char* file,
                                int line) noexcept;

}  // namespace cohort::parallel

/// Registers a hook where it is written, at namespace scope:
///
///     COHORT_REGISTER_COMM_HOOK("all_reduce", [] { return cohort::parallel::all_reduce_hook(); });
#define COHORT_REGISTER_COMM_HOOK(name, ...) \
  COHORT_REGISTER_AT_LOAD(parallel::register_comm_hook_at_load, name, __VA_ARGS__)

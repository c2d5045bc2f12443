// LibTorch has one cache of casts for all threads, and can only drop all of it. It counts scopes by thread.
// So the end of one thread's outermost scope would drop the casts of a forward on another thread: a parameter
// would be cast again, and the bits of its gradient would depend on time. If instead the last scope of the
// process dropped the cache, a step of one thread would leave its old casts to the thread's next scope.
// Always: the cache is switched off (a switch of each thread) but on one thread, and on those that work for
// it.
#include "cohort/optim/autocast.h"

#include <ATen/autocast_mode.h>

#include <atomic>

#include "cohort/base/error.h"

namespace cohort::optim {
namespace {

// The mark of the thread that has the cache; null: no thread has it. A thread keeps it between its scopes, so
// that the bits do not depend on whether scopes of two threads overlap.
constinit std::atomic<const void*> cache_owner{nullptr};

// Its address names a thread. It gives the cache back when the thread ends.
class ThreadMark {
 public:
  ThreadMark() = default;
  ~ThreadMark() {
    const void* own = this;
    cache_owner.compare_exchange_strong(own, nullptr);
  }
  ThreadMark(const ThreadMark&) = delete;
  ThreadMark& operator=(const ThreadMark&) = delete;

  bool has_cache() const { return cache_owner.load() == this; }
  bool take_cache() const {
    const void* expected = nullptr;
    return cache_owner.compare_exchange_strong(expected, this) || expected == this;
  }
};

const ThreadMark& this_thread() {
  thread_local const ThreadMark mark;
  return mark;
}

}  // namespace

Autocast::Autocast(c10::DeviceType device, c10::ScalarType dtype, bool enabled, bool cache_enabled)
    : device_(device),
      previous_dtype_(at::autocast::get_autocast_dtype(device)),
      previous_enabled_(at::autocast::is_autocast_enabled(device)),
      previous_cache_enabled_(at::autocast::is_autocast_cache_enabled()) {
  // Before the thread's state is changed: no destructor runs after an error here.
  if (dtype != at::kBFloat16 && dtype != at::kHalf)
    throw UsageError("optim.autocast", base::concat("got dtype ", dtype, ", expected BFloat16 or Half"));
  // A scope that casts nothing asks for no cache, and leaves the switch to the scopes in it.
  bool caches = cache_enabled && previous_cache_enabled_;
  if (caches && enabled) caches = this_thread().take_cache();
  at::autocast::set_autocast_cache_enabled(caches);
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  // The cache holds weights that were cast. After the outermost scope an optimizer may change the weights.
  if (at::autocast::decrement_nesting() == 0 && this_thread().has_cache()) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, previous_enabled_);
  at::autocast::set_autocast_dtype(device_, previous_dtype_);
  at::autocast::set_autocast_cache_enabled(previous_cache_enabled_);
}

}  // namespace cohort::optim

#include "cohort/core/parallel.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

namespace cohort::core {
namespace {

// Enters a parallel region: libgomp's own entry point, which LLVM's and Intel's runtimes have as well. 0
// threads means the caller's setting.
using EnterRegion = void (*)(void (*body)(void*), void* argument, unsigned threads, unsigned flags);

EnterRegion enter_region() {
  static const auto found = reinterpret_cast<EnterRegion>(::dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

struct Region {
  Region(std::int64_t items, std::int64_t stretch, c10::function_ref<void(std::int64_t, std::int64_t)> body)
      : count(items), grain(std::max<std::int64_t>(stretch, 1)), work(body) {}

  const std::int64_t count;
  const std::int64_t grain;
  const c10::function_ref<void(std::int64_t, std::int64_t)> work;
  std::atomic<std::int64_t> next{0};
  // What the runtime's own barrier orders too; sanitizers do not see into that.
  std::atomic<std::int64_t> finished{0};
  std::mutex mutex;
  std::int64_t first_failed = -1;  // under mutex, as `error`
  std::exception_ptr error;

  void run() {
    for (;;) {
      const std::int64_t begin = next.fetch_add(grain, std::memory_order_acq_rel);
      if (begin >= count) break;
      try {
        work(begin, std::min(begin + grain, count));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (first_failed < 0 || begin < first_failed) {
          first_failed = begin;
          error = std::current_exception();
        }
      }
    }
    finished.fetch_add(1, std::memory_order_acq_rel);
  }
};

}  // namespace

void parallel_for(std::int64_t count, std::int64_t grain,
                  c10::function_ref<void(std::int64_t begin, std::int64_t end)> work) {
  Region region(count, grain, work);
  const int threads =
      at::get_num_threads();  // also gives this thread LibTorch's number, before the region asks
  if (threads > 1 && region.grain < count && !at::in_parallel_region() && enter_region() != nullptr) {
    enter_region()([](void* argument) { static_cast<Region*>(argument)->run(); }, &region, 0, 0);
  } else {
    region.run();
  }
  static_cast<void>(region.finished.load(std::memory_order_acquire));
  if (region.error) std::rethrow_exception(region.error);
}

}  // namespace cohort::core

#include "cohort/core/thread_settings.h"

#include <ATen/Parallel.h>

#include <mutex>
#include <thread>

namespace cohort::core {

// Note [The number of threads is a thread's own, nearly]
// at::set_num_threads sets OpenMP's and MKL's number for the calling thread, and in passing the number that
// every thread gets that has not computed yet. The second is restored, by a thread that has nothing else to
// do with it.
void set_num_threads_this_thread(int threads) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const int of_new_threads = at::get_num_threads();
  at::set_num_threads(threads);
  if (threads != of_new_threads) std::thread([=] { at::set_num_threads(of_new_threads); }).join();
}

}  // namespace cohort::core

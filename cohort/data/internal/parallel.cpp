#include "cohort/data/internal/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/threads/thread_pool.h"

namespace cohort::data {

void for_each_item(std::int64_t count, int threads,
                   const std::function<void(int thread, std::int64_t item)>& work) {
  constexpr std::int64_t kChunk = 16;
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  std::int64_t error_item = count;
  const auto run = [&](int thread) {
    for (;;) {
      const std::int64_t begin = next.fetch_add(kChunk);
      for (std::int64_t item = begin; item < std::min(begin + kChunk, count); ++item) {
        try {
          work(thread, item);
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (item < error_item) {
            error_item = item;
            error = std::current_exception();
          }
          next.store(count);
          return;
        }
      }
      if (begin + kChunk >= count) return;
    }
  };
  const auto useful = static_cast<int>(std::min<std::int64_t>(threads, (count + kChunk - 1) / kChunk));
  base::ThreadPool pool({.name = "data", .max_threads = std::max(1, useful - 1)});
  {
    // They use what is on this stack, so each way out of here waits until they have ended: when no item is
    // left.
    struct Others {
      std::vector<base::Future<void>> futures;
      ~Others() {
        for (const auto& future : futures) future.wait(base::Deadline::never());
      }
    } other_threads;
    other_threads.futures.reserve(static_cast<std::size_t>(std::max(0, useful)));
    for (int thread = 1; thread < useful; ++thread) {
      try {
        other_threads.futures.push_back(pool.submit("items", [&run, thread] { run(thread); }));
      } catch (const SystemError&) {
        break;  // no more threads: those that there are do all of it
      }
    }
    run(0);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace cohort::data

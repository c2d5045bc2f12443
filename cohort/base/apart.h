#pragma once

#include <future>
#include <thread>
#include <type_traits>
#include <utility>

namespace cohort::base {

/// Runs `fn` on a thread of its own, and returns what comes of it: for calls that have no deadline. Who gives
/// up waiting (base/threads/wait.h) leaves the thread behind, so `fn` must own what it uses.
template <typename Fn>
std::future<std::invoke_result_t<Fn&>> run_apart(Fn fn) {
  std::packaged_task<std::invoke_result_t<Fn&>()> task(std::move(fn));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  return result;
}

}  // namespace cohort::base

#pragma once

#include <thread>
#include <type_traits>
#include <utility>

#include "cohort/base/threads/future.h"

namespace cohort::base {

/// Runs `fn` on a detached thread, and returns its result: for calls that have no deadline. Who gives up
/// waiting leaves the thread behind, so `fn` must own what it uses. `what`, a literal, names the call in
/// messages.
template <typename Fn>
Future<std::invoke_result_t<Fn&>> run_detached(const char* what, Fn fn) {
  Promise<std::invoke_result_t<Fn&>> promise(what);
  auto result = promise.future();
  std::thread([promise = std::move(promise), fn = std::move(fn)]() mutable { promise.run(fn); }).detach();
  return result;
}

}  // namespace cohort::base

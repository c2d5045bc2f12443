// A result is written once, and then marked as done under the mutex. Whoever waits shares the state, so the
// promise may be destroyed earlier. The thread that marks it then runs the callbacks, without the mutex: a
// callback may wait for another future, or add a callback. A waiter that gives up marks the state as
// abandoned.
#include "cohort/base/threads/future.h"

#include <chrono>

#include "cohort/base/error.h"
#include "cohort/base/threads/wait.h"

namespace cohort::base::future_detail {

bool State::wait(Deadline deadline) {
  const auto is_done = [this] { return done(); };
  if (done()) return true;
  if (helper_ && !deadline.expired()) helper_([&] { return done() || deadline.expired(); });
  std::unique_lock lock(mutex_);
  return base::wait(finished_, lock, is_done, deadline);
}

void State::wait_or_throw(Deadline deadline) {
  if (wait(deadline) || !abandon()) {
    if (error_) std::rethrow_exception(error_);
    return;
  }
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.elapsed()).count();
  throw TimeoutError("base.future", concat("waited ", waited, " ms for ", description()),
                     "a longer timeout where that is slow and not stuck");
}

bool State::abandon() {
  const std::lock_guard lock(mutex_);
  if (done()) return false;
  if (!std::exchange(is_abandoned_, true)) on_abandoned();
  return true;
}

void State::claim_or_throw() {
  if (claim()) return;
  throw UsageError("base.future", concat(what(), " is set a second time"), "a promise for each result");
}

void State::set(std::exception_ptr error) {
  claim_or_throw();
  finish(std::move(error));
}

void State::finish(std::exception_ptr error) noexcept {
  // Nobody reads it before done_ is set, which releases it.
  error_ = std::move(error);
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    on_done();
    done_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
  }
  finished_.notify_all();
  for (const auto& callback : callbacks) callback();
}

void State::on_ready(std::function<void()> fn) {
  {
    const std::lock_guard lock(mutex_);
    if (!done()) return callbacks_.push_back(std::move(fn));
  }
  fn();
}

}  // namespace cohort::base::future_detail

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "cohort/base/threads/future.h"

/// Which backwards of a context have failed, and what ends then: Note [Failed backwards], context_state.cpp.
namespace cohort::rpc {

/// Of the backwards of one context on one worker, which are numbered from 1 on. Threads: any.
class BackwardFailures {
 public:
  using OnFailure = std::function<void(const std::exception_ptr& error)>;
  /// What on_failure() got: the backward, and a number.
  using Key = std::pair<std::uint64_t, std::uint64_t>;

  /// The backward with this number has failed, here or elsewhere. The first error counts. What on_failure()
  /// got is called.
  void fail(std::uint64_t backward, const std::exception_ptr& error);
  /// Has `fn` called if the backward fails: by the thread that says so, or by this one at once where it has
  /// failed.
  Key on_failure(std::uint64_t backward, OnFailure fn);
  /// Drops it, unless it has been called, or is called at this moment.
  void remove(Key key);
  /// on_failure() until `result` is there: a backward may last, and make any number of calls.
  template <typename T>
  static void on_failure_until(const base::Future<T>& result,
                               const std::shared_ptr<BackwardFailures>& failures, std::uint64_t backward,
                               OnFailure fn) {
    const Key key = failures->on_failure(backward, std::move(fn));
    result.on_ready([weak = std::weak_ptr(failures), key] {
      if (const auto alive = weak.lock()) alive->remove(key);
    });
  }
  /// Null where the backward has not failed. An earlier one than the last that failed is over, and nobody
  /// waits for its parts.
  std::exception_ptr error_of(std::uint64_t backward) const;
  /// Drops what on_failure() got, where no backward runs any more.
  void clear();
  /// How many functions wait for a failure.
  std::size_t num_waiting() const;

 private:
  mutable std::mutex mutex_;  // of all below
  std::uint64_t last_failed_ = 0;
  std::exception_ptr error_;
  std::map<Key, OnFailure> on_failure_;
  std::uint64_t last_key_ = 0;
};

/// While it lives, this thread goes backward: the calls that it makes belong to the backward, and end with
/// it, and so does each wait for a result. Threads: the one that made it.
class BackwardScope {
 public:
  /// If this thread goes backward already, the failure of that backward is one of this backward too.
  BackwardScope(std::shared_ptr<BackwardFailures> failures, std::uint64_t backward);
  /// The thread does another's work meanwhile.
  explicit BackwardScope(std::nullptr_t);
  ~BackwardScope();
  BackwardScope(const BackwardScope&) = delete;
  BackwardScope& operator=(const BackwardScope&) = delete;

  /// Of the backward that this thread goes; null where it goes none.
  static const BackwardScope* current();
  /// Null where the backward has not failed.
  std::exception_ptr error() const { return failures_->error_of(backward_); }
  BackwardFailures::Key on_failure(BackwardFailures::OnFailure fn) const {
    return failures_->on_failure(backward_, std::move(fn));
  }
  void remove(BackwardFailures::Key key) const { failures_->remove(key); }
  template <typename T>
  void on_failure_until(const base::Future<T>& result, BackwardFailures::OnFailure fn) const {
    BackwardFailures::on_failure_until(result, failures_, backward_, std::move(fn));
  }

 private:
  const std::shared_ptr<BackwardFailures> failures_;  // null: none
  const std::uint64_t backward_ = 0;
  const BackwardScope* const outer_;
  std::shared_ptr<BackwardFailures> around_;  // of the backward that the thread goes already; null: of none
  BackwardFailures::Key in_around_;
};

/// Returns once the result is there, the deadline has passed, or the backward that this thread goes has
/// failed: throws its error then. Returns at once where the thread goes none.
template <typename T>
void wait_in_backward(const base::Future<T>& result, base::Deadline deadline) {
  const BackwardScope* const backward = BackwardScope::current();
  if (backward == nullptr || result.ready()) return;
  if (const std::exception_ptr error = backward->error()) std::rethrow_exception(error);
  // With the result's own helper, which may bring it about. Short calls are answered by then.
  if (result.wait(base::Deadline(std::chrono::milliseconds(1)).sooner(deadline))) return;
  if (deadline.expired()) return;
  const auto end = std::make_shared<base::Promise<void>>("a result, or the failure of a backward");
  base::Future<void> ended = end->future();
  const auto failure =
      backward->on_failure([end](const std::exception_ptr& error) { end->try_set_error(error); });
  // Weakly: a program may wait for the result many times, each time for a while.
  result.on_ready([weak = std::weak_ptr(end)] {
    if (const auto alive = weak.lock()) alive->try_set();
  });
  const bool has_ended = ended.wait(deadline);
  backward->remove(failure);
  if (has_ended) ended.get(deadline);
}

}  // namespace cohort::rpc

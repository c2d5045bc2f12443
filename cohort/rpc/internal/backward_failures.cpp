// One failure is kept, that of the latest backward which has failed: all earlier ones are over. Functions
// wait under the number of their backward, so a failure calls those of earlier backwards too. They are
// called, and destroyed, without the mutex: they give up calls, and may come back here.
#include "cohort/rpc/internal/backward_failures.h"

#include <limits>
#include <vector>

namespace cohort::rpc {
namespace {

thread_local const BackwardScope* current_backward_scope = nullptr;

}  // namespace

void BackwardFailures::fail(std::uint64_t backward, const std::exception_ptr& error) {
  std::vector<OnFailure> fns;
  {
    const std::lock_guard lock(mutex_);
    if (backward <= last_failed_) return;
    last_failed_ = backward;
    error_ = error;
    const auto begin = on_failure_.begin(),
               end = on_failure_.upper_bound({backward, std::numeric_limits<std::uint64_t>::max()});
    for (auto fn = begin; fn != end; ++fn) fns.push_back(std::move(fn->second));
    on_failure_.erase(begin, end);
  }
  for (const OnFailure& fn : fns) fn(error);
}

BackwardFailures::Key BackwardFailures::on_failure(std::uint64_t backward, OnFailure fn) {
  std::exception_ptr error;
  Key key(backward, 0);
  {
    const std::lock_guard lock(mutex_);
    key.second = ++last_key_;
    if (backward > last_failed_) {
      on_failure_.emplace(key, std::move(fn));
      return key;
    }
    error = error_;
  }
  fn(error);
  return key;
}

// What it frees may have a destructor that comes back here: it is destroyed without the mutex.
void BackwardFailures::remove(Key key) {
  std::map<Key, OnFailure>::node_type removed;
  const std::lock_guard lock(mutex_);
  removed = on_failure_.extract(key);
}

std::exception_ptr BackwardFailures::error_of(std::uint64_t backward) const {
  const std::lock_guard lock(mutex_);
  return backward <= last_failed_ ? error_ : nullptr;
}

void BackwardFailures::clear() {
  std::map<Key, OnFailure> dropped;
  const std::lock_guard lock(mutex_);
  dropped.swap(on_failure_);
}

std::size_t BackwardFailures::num_waiting() const {
  const std::lock_guard lock(mutex_);
  return on_failure_.size();
}

BackwardScope::BackwardScope(std::shared_ptr<BackwardFailures> failures, std::uint64_t backward)
    : failures_(std::move(failures)), backward_(backward), outer_(current_backward_scope) {
  const BackwardScope* const around = current();
  if (around != nullptr && (around->failures_ != failures_ || around->backward_ != backward_)) {
    around_ = around->failures_;
    in_around_ =
        around->on_failure([weak = std::weak_ptr(failures_), backward](const std::exception_ptr& error) {
          if (const auto inner = weak.lock()) inner->fail(backward, error);
        });
  }
  current_backward_scope = this;
}

BackwardScope::BackwardScope(std::nullptr_t) : outer_(current_backward_scope) {
  current_backward_scope = this;
}

BackwardScope::~BackwardScope() {
  if (around_ != nullptr) around_->remove(in_around_);
  current_backward_scope = outer_;
}

const BackwardScope* BackwardScope::current() {
  const BackwardScope* const scope = current_backward_scope;
  return scope == nullptr || scope->failures_ == nullptr ? nullptr : scope;
}

}  // namespace cohort::rpc

#include "cohort/rpc/internal/backward_failures.h"

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
    const auto begin = on_failure_.begin(), end = on_failure_.upper_bound(backward);
    for (auto fn = begin; fn != end; ++fn) fns.push_back(std::move(fn->second));
    on_failure_.erase(begin, end);
  }
  for (const OnFailure& fn : fns) fn(error);
}

void BackwardFailures::on_failure(std::uint64_t backward, OnFailure fn) {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    if (backward > last_failed_) {
      on_failure_.emplace(backward, std::move(fn));
      return;
    }
    error = error_;
  }
  fn(error);
}

std::exception_ptr BackwardFailures::error_of(std::uint64_t backward) const {
  const std::lock_guard lock(mutex_);
  return backward <= last_failed_ ? error_ : nullptr;
}

void BackwardFailures::clear() {
  std::multimap<std::uint64_t, OnFailure> dropped;
  const std::lock_guard lock(mutex_);
  dropped.swap(on_failure_);
}

BackwardScope::BackwardScope(std::shared_ptr<BackwardFailures> failures, std::uint64_t backward)
    : failures_(std::move(failures)), backward_(backward), outer_(current_backward_scope) {
  const BackwardScope* const around = current();
  if (around != nullptr && (around->failures_ != failures_ || around->backward_ != backward_)) {
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
  current_backward_scope = outer_;
}

const BackwardScope* BackwardScope::current() {
  const BackwardScope* const scope = current_backward_scope;
  return scope == nullptr || scope->failures_ == nullptr ? nullptr : scope;
}

}  // namespace cohort::rpc

#include "cohort/rpc/internal/context_scope.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace cohort::rpc {
namespace {

constexpr int kLowNumbers = 256;  // calls of a handler, as a rule

thread_local ContextScope* current_scope = nullptr;

}  // namespace

ContextScope::ContextScope(std::shared_ptr<ContextState> context, CallPath path,
                           std::vector<at::Tensor> inputs, std::uint32_t first_call)
    : context_(std::move(context)),
      path_(std::move(path)),
      inputs_(std::move(inputs)),
      outer_(std::exchange(current_scope, this)),
      num_calls_(first_call) {
  // Numbers for the Send nodes of this scope's calls, below those of all nodes that the scope makes later.
  next_low_ = at::sequence_number::peek();
  for (int i = 0; i < kLowNumbers; ++i) last_low_ = at::sequence_number::get_and_increment();
}

// Scopes may end in another order than they began: a context that is replaced by the next one.
ContextScope::~ContextScope() {
  ContextScope** at = &current_scope;
  while (*at != nullptr && *at != this) at = &(*at)->outer_;
  if (*at == this) *at = outer_;
}

NoContextScope::NoContextScope() : outer_(std::exchange(current_scope, nullptr)) {}
NoContextScope::~NoContextScope() {
  current_scope = outer_;
}

NoCallerScope::NoCallerScope() {
  if (c10::InferenceMode::is_enabled()) mode_.emplace(false);
}

ContextScope* ContextScope::current() {
  return current_scope;
}

ContextScope* ContextScope::recording(const void* home) {
  ContextScope* const scope = current_scope;
  return scope != nullptr && scope->context_->is_of(home) && at::GradMode::is_enabled() ? scope : nullptr;
}

std::uint64_t ContextScope::next_low_number() {
  if (next_low_ > last_low_)
    return at::sequence_number::get_and_increment();  // in the order of calls all the same
  return next_low_++;
}

RecordedPlace ContextScope::next_place() {
  RecordedPlace place{context_->id(), path_};
  place.path.push_back(num_calls_++);
  return place;
}

std::shared_ptr<RecordedCall> ContextScope::record(Encoded& arguments, Callee callee) {
  return calls_.emplace_back(
      std::make_shared<RecordedCall>(arguments, context_->anchor(), next_low_number(), std::move(callee)));
}

bool ContextScope::has_history(const at::Tensor& tensor) const {
  return !tensor.is_leaf() || std::any_of(inputs_.begin(), inputs_.end(),
                                          [&](const at::Tensor& input) { return input.is_same(tensor); });
}

}  // namespace cohort::rpc

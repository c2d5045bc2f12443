#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cohort/rpc/call_context.h"
#include "cohort/rpc/internal/backward_failures.h"
#include "cohort/rpc/internal/caller_state.h"
#include "cohort/rpc/internal/context_state.h"
#include "cohort/rpc/internal/gradient_nodes.h"

namespace cohort::rpc {

/// Makes a context the current one of this thread while it lives, and keeps the calls that the thread makes
/// in it. A scope is the root's program, or that of one handler.
class ContextScope {
 public:
  /// `inputs`: the handler's arguments. `first_call`: the number of its first call.
  ContextScope(std::shared_ptr<ContextState> context, CallPath path, std::vector<at::Tensor> inputs = {},
               std::uint32_t first_call = 0);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  /// The scope of this thread in which a call of the agent with this mark is to be recorded; null where it is
  /// not.
  static ContextScope* recording(const void* home);
  /// The newest scope of this thread; null where there is none.
  static ContextScope* current();

  const std::shared_ptr<ContextState>& context() const { return context_; }
  const CallPath& path() const { return path_; }
  const std::vector<at::Tensor>& inputs() const { return inputs_; }
  /// The number of the next call.
  std::uint32_t num_calls() const { return num_calls_; }
  /// The number of the recompute() that begins now, among those of this scope that need a seed of their own.
  std::uint64_t next_recompute() { return num_recomputes_++; }
  /// Another scope has made the calls before this number.
  void skip_to(std::uint32_t num_calls) { num_calls_ = num_calls; }
  /// The place of the next call.
  RecordedPlace next_place();
  /// The nodes of a call in the graph. Cuts the arguments off: RecordedCall.
  std::shared_ptr<RecordedCall> record(Encoded& arguments, Callee callee);
  /// late_calls() of all calls.
  std::vector<at::Tensor> late() { return late_calls(calls_); }

  /// Whether `tensor`, whose gradient is asked for, has a history in this scope: its gradient continues
  /// there.
  bool has_history(const at::Tensor& tensor) const;

 private:
  std::uint64_t next_low_number();

  const std::shared_ptr<ContextState> context_;
  const CallPath path_;
  const std::vector<at::Tensor> inputs_;
  ContextScope* outer_;
  std::uint32_t num_calls_;
  std::uint64_t num_recomputes_ = 0;
  std::uint64_t next_low_ = 0, last_low_ = 0;
  std::vector<std::shared_ptr<RecordedCall>> calls_;
};

/// While it lives, this thread has no context.
class NoContextScope {
 public:
  NoContextScope();
  ~NoContextScope();
  NoContextScope(const NoContextScope&) = delete;
  NoContextScope& operator=(const NoContextScope&) = delete;

 private:
  ContextScope* const outer_;
};

/// While it lives this thread, which does another's work, has nothing of its own: no call that it answers, no
/// context, no backward, no seeds, and LibTorch's modes at their defaults.
class NoCallerScope {
 public:
  NoCallerScope();
  NoCallerScope(const NoCallerScope&) = delete;
  NoCallerScope& operator=(const NoCallerScope&) = delete;

 private:
  const NoContextScope no_context_;
  const BackwardScope no_backward_{nullptr};
  const CallScope call_{nullptr};
  const CallerStateScope state_{CallerState()};
  std::optional<c10::InferenceMode> mode_;
};

}  // namespace cohort::rpc

#pragma once

#include <optional>
#include <thread>

#include "cohort/rpc/internal/context_scope.h"
#include "cohort/rpc/reference.h"

namespace cohort::rpc {

/// The part of a graph that a call makes on its callee, while the handler runs. Threads: the handler's.
class RecordedPart {
 public:
  /// Cuts the arguments off: the handler gets leaves. Its calls are recorded too, unless it answers later.
  RecordedPart(std::shared_ptr<ContextState> context, ContextState::CallKey key, CallPath path,
               Encoded& arguments, bool answers_later);

  /// Ends the part: the results travel without their graph, and those that need a gradient say so. Returns
  /// whether the call is late: Note [Late calls].
  bool end(Encoded& results);
  /// Ends it with results that stay here: their tensors become leaves.
  void end(ObjectValue& value);

 private:
  bool may_record() const;
  void cut_off(ObjectValue& value) const;
  ContextState::Tensors end_graph(ContextState::Tensors results);

  const std::shared_ptr<ContextState> context_;
  const ContextState::CallKey key_;
  const std::thread::id thread_ = std::this_thread::get_id();
  ContextState::CallRecord record_;
  std::optional<ContextScope> scope_;  // of the handler's calls
};

/// An object that a program made within `scope`: its tensors become leaves, from which the gradients of their
/// users continue.
void record_object(ContextScope& scope, ContextState::CallKey key, ObjectValue& value);

}  // namespace cohort::rpc

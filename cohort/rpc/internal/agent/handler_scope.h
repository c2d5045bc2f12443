#pragma once

#include "cohort/rpc/internal/context_scope.h"

namespace cohort::rpc {

struct AgentCore;

/// While it lives, this thread runs a handler of the agent; of none, where it is null. Threads: the one that
/// made it.
class HandlerScope {
 public:
  explicit HandlerScope(AgentCore* agent);
  ~HandlerScope();
  HandlerScope(const HandlerScope&) = delete;
  HandlerScope& operator=(const HandlerScope&) = delete;
  /// The agent whose handler this thread runs; null outside of handlers.
  static AgentCore* agent();

 private:
  AgentCore* const outer_;
};

/// A message may come on a thread that waits for an answer: what that thread does is nothing to the message.
class DeliveryScope {
  const NoCallerScope caller_;
  const HandlerScope handler_{nullptr};
};

}  // namespace cohort::rpc

#pragma once

#include <chrono>
#include <cstddef>
#include <stop_token>
#include <string>

#include "cohort/base/threads/deadline.h"

/// What a running handler may ask about the call that it answers.
namespace cohort::rpc {

/// The call that the current thread answers.
struct CallContext {
  std::string caller;                                 ///< the worker's name
  base::Deadline deadline = base::Deadline::never();  ///< by which the caller must have its answer
  std::stop_token stop;  ///< asked once the caller has its error, is gone, or waits no more
};

/// The call that this thread answers; null outside of handlers.
const CallContext* current_call();

/// Asks to stop once the caller has its error, is gone, or does not wait any more. Never, outside of
/// handlers.
std::stop_token stop_token();

/// When the caller of the handler that runs here gets its error; never, outside of handlers.
base::Deadline remaining_deadline();

/// The deadline of a call that begins now with this timeout; a timeout of zero is none.
base::Deadline deadline_of(std::chrono::milliseconds timeout);

/// Makes a call the current one while it lives.
class CallScope {
 public:
  explicit CallScope(const CallContext& context);
  /// None is the current one.
  explicit CallScope(std::nullptr_t);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

 private:
  const CallContext* const outer_;
};

}  // namespace cohort::rpc

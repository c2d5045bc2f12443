#include "cohort/rpc/call_context.h"

namespace cohort::rpc {
namespace {

thread_local const CallContext* current = nullptr;

}  // namespace

const CallContext* current_call() {
  return current;
}
std::stop_token stop_token() {
  return current == nullptr ? std::stop_token() : current->stop;
}
base::Deadline remaining_deadline() {
  return current == nullptr ? base::Deadline::never() : current->deadline;
}
base::Deadline deadline_of(std::chrono::milliseconds timeout) {
  return timeout.count() == 0 ? base::Deadline::never() : base::Deadline(timeout);
}

CallScope::CallScope(const CallContext& context) : outer_(current) {
  current = &context;
}
CallScope::CallScope(std::nullptr_t) : outer_(current) {
  current = nullptr;
}
CallScope::~CallScope() {
  current = outer_;
}

}  // namespace cohort::rpc

#include "cohort/rpc/future.h"

#include "cohort/rpc/internal/backward_failures.h"
#include "cohort/rpc/internal/context_scope.h"

namespace cohort::rpc::function_detail {

void call_without_caller(const std::function<void()>& fn) {
  const NoCallerScope scope;
  fn();
}

void wait_unless_backward_fails(const base::Future<Encoded>& result, base::Deadline deadline) {
  wait_in_backward(result, deadline);
}

}  // namespace cohort::rpc::function_detail

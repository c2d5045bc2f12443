#include "cohort/rpc/future.h"

#include "cohort/rpc/internal/context_scope.h"

namespace cohort::rpc::function_detail {

void call_without_caller(const std::function<void()>& fn) {
  const NoCallerScope scope;
  fn();
}

}  // namespace cohort::rpc::function_detail

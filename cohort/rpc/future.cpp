#include "cohort/rpc/future.h"

#include <c10/core/InferenceMode.h>

#include "cohort/rpc/internal/caller_state.h"
#include "cohort/rpc/internal/context_scope.h"

namespace cohort::rpc::function_detail {

void call_without_caller(const std::function<void()>& fn) {
  std::optional<c10::InferenceMode> mode;
  if (c10::InferenceMode::is_enabled()) mode.emplace(false);
  const CallScope call(nullptr);
  const NoContextScope context;
  const CallerStateScope state{CallerState()};
  fn();
}

}  // namespace cohort::rpc::function_detail

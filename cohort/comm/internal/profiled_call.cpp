#include "cohort/comm/internal/profiled_call.h"

#include "cohort/base/error.h"

namespace cohort::comm {

std::shared_ptr<ProfiledCall> ProfiledCall::begin(const char* backend, const char* call,
                                                  std::span<const at::Tensor> tensors,
                                                  const std::string& group) {
  // Mostly nobody profiles, and then a call pays for this look alone.
  if (!at::hasCallbacks()) return nullptr;
  std::shared_ptr<ProfiledCall> profiled(new ProfiledCall);
  at::RecordFunction& record = profiled->record_;
  if (!record.isActive()) return nullptr;
  record._setAsync();  // it may end on another thread
  const std::string title = base::concat(backend, ":", call);
  if (!record.needsInputs()) {
    record.before(title);
    return profiled;
  }
  std::vector<c10::IValue> inputs;
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    inputs.emplace_back(tensor);
    bytes += static_cast<std::int64_t>(tensor.nbytes());
  }
  inputs.emplace_back(bytes);
  inputs.emplace_back(group);
  record.before(title, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
  return profiled;
}

}  // namespace cohort::comm

#include "cohort/script/internal/ir/boxed.h"

#include <ATen/record_function.h>

#include <functional>
#include <optional>

namespace cohort::script {
namespace {

using ArgumentType = TensorPlace::ArgumentType;

c10::IValue argument(const TensorPlace& place, const Tensors& values) {
  const auto value = [&](int slot) {
    if (slot == kUndefined) return at::Tensor();
    const at::Tensor& tensor = values[at_slot(slot)];
    // An operator that changes sizes in place must not change the frame's handle, which later runs use.
    return place.fresh_handle ? shallow_copy(tensor) : tensor;
  };
  if (place.kind == ArgumentType::kTensor) return value(place.slots.front());
  if (place.kind == ArgumentType::kList) {
    c10::List<at::Tensor> list;
    list.reserve(place.slots.size());
    for (const int slot : place.slots) list.push_back(value(slot));
    return list;
  }
  c10::List<std::optional<at::Tensor>> list;
  for (const int slot : place.slots) {
    list.push_back(slot == kUndefined ? std::optional<at::Tensor>() : std::optional(value(slot)));
  }
  return list;
}

}  // namespace

at::Tensor shallow_copy(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
}

void run_boxed(const OperatorCall& call, const Tensors& values, torch::jit::Stack& stack,
               KernelCallOptions options) {
  stack.clear();
  auto place = call.inputs.begin();
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    if (place == call.inputs.end() || place->index != i) {
      stack.push_back(call.arguments[i]);
    } else {
      stack.push_back(argument(*place++, values));
    }
  }
  if (call.keys.empty()) {
    call.op.callBoxed(&stack);
    return;
  }
  c10::DispatchKeySet keys = call.keys;
  // The kernel there fills in the scope's generator, and continues.
  if (options.in_random_scope && call.op.hasKernelForDispatchKey(kRandomKey)) keys = keys.add(kRandomKey);
  // redispatchBoxed() tells profilers nothing, so the call is announced here under its own name.
  std::optional<at::RecordFunction> observed;
  if (options.is_observed) {
    observed.emplace(at::RecordScope::FUNCTION);
    observed->before(std::cref(call.op.schema()),
                     c10::ArrayRef<const c10::IValue>(stack.data(), stack.size()));
  }
  call.op.redispatchBoxed(keys, &stack);
}

}  // namespace cohort::script

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "cohort/ops/operator.h"

namespace cohort::ops::detail {
namespace {

using Stack = torch::jit::Stack;

/// Casts the tensors of a call as a rule says, then calls the operator outside of autocast.
class AutocastKernel : public c10::OperatorKernel {
 public:
  AutocastKernel(Autocast rule, c10::DeviceType device) : rule_(rule), device_(device) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    // Else the call at the end would come back here. Operators that the kernel itself calls run without
    // autocast too.
    const c10::impl::ExcludeDispatchKeyGuard outside(
        at::autocast::get_autocast_dispatch_key_from_device_type(device_));
    const std::size_t num_arguments = op.schema().arguments().size();
    const at::ScalarType dtype = choose(torch::jit::last(*stack, num_arguments));
    for (std::size_t i = stack->size() - num_arguments; i < stack->size(); ++i) {
      c10::IValue& value = (*stack)[i];
      if (value.isTensor()) {
        // The cache casts a weight once in a forward, however often it is used. Tensors that are not eligible
        // stay.
        value = at::autocast::cached_cast(dtype, value.toTensor(), device_);
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors = value.toTensorVector();
        for (at::Tensor& tensor : tensors) tensor = at::autocast::cached_cast(dtype, tensor, device_);
        value = tensors;
      }
    }
    op.callBoxed(stack);
  }

 private:
  at::ScalarType choose(c10::ArrayRef<c10::IValue> arguments) const {
    // As LibTorch's own lists: float32, lower precision, and the widest type among the arguments ("promote").
    if (rule_ == Autocast::kFloat32) return at::kFloat;
    const at::ScalarType narrow = at::autocast::get_autocast_dtype(device_);
    if (rule_ == Autocast::kNarrow) return narrow;
    bool wide = false;
    const auto add_tensor = [&](const at::Tensor& tensor) {
      wide = wide || (at::autocast::is_eligible(tensor, device_) && tensor.scalar_type() != narrow);
    };
    for (const c10::IValue& argument : arguments) {
      if (argument.isTensor()) add_tensor(argument.toTensor());
      if (argument.isTensorList()) {
        for (const at::Tensor& tensor : argument.toTensorVector()) add_tensor(tensor);
      }
    }
    return wide ? at::kFloat : narrow;
  }

  Autocast rule_;
  c10::DeviceType device_;
};

}  // namespace

void add_autocast(torch::Library& library, const std::string& name, Autocast rule) {
  for (const c10::DeviceType device : {c10::kCPU, c10::kCUDA}) {
    library.impl(name.c_str(),
                 torch::dispatch(at::autocast::get_autocast_dispatch_key_from_device_type(device),
                                 torch::CppFunction::makeFromBoxedFunctor(
                                     std::make_unique<AutocastKernel>(rule, device))));
  }
}

}  // namespace cohort::ops::detail

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/arg.h>

#include <functional>
#include <string>
#include <vector>

#include "cohort/base/error.h"

/// Do an operator's parts agree? Its gradient with its values, its schema with what it does, its meta
/// function with its shapes.
///
///     const at::Tensor x = at::ones({2, 3}, at::kDouble).requires_grad_();
///     ops::opcheck("mine::scale", {x, 2.0});
///     ops::gradcheck([](const auto& inputs) { return std::vector<at::Tensor>{inputs[0].sin()}; }, {x});
namespace cohort::ops {

/// A check has found a difference; the message says where, and both values.
class CheckError : public Error {
 public:
  using Error::Error;
};

/// A function of tensors whose gradient is checked. Inputs that do not require a gradient are constants.
using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// How gradcheck() judges.
struct GradcheckOptions {
  /// How far an element is moved, both ways.
  TORCH_ARG(double, eps) = 1e-6;
  /// A difference is allowed up to atol + rtol * |value by differences|.
  TORCH_ARG(double, atol) = 1e-5;
  TORCH_ARG(double, rtol) = 1e-3;
};

/// The gradients that backward gives for `function` at `inputs` are those that central differences give, for
/// every element of every input and output, and the same bits when asked twice.
/// Shapes: small ones; the function is called twice for each input element, backward once for each output
/// element. Dtypes: inputs with a gradient are float64 (in float32 differences have no digits left). Choose
/// points where the function is smooth within eps. Inputs are copied, and stay as they are.
/// Threads: runs on the caller; backward in LibTorch's engine.
/// Throws: UsageError for inputs that cannot be checked; CheckError naming output, input, their elements and
/// both values; whatever `function` throws.
void gradcheck(const TensorFunction& function, const std::vector<at::Tensor>& inputs,
               const GradcheckOptions& options = {});

/// The same for the gradients of the gradients: checks backward of backward, with gradients flowing in that
/// are drawn from a fixed seed. Throws: as gradcheck(); CheckError when the gradient cannot be
/// differentiated.
void gradgradcheck(const TensorFunction& function, const std::vector<at::Tensor>& inputs,
                   const GradcheckOptions& options = {});

/// How opcheck() judges.
struct OpcheckOptions {
  /// false: the operator has no meta function, as its sizes depend on values; then having one is an error.
  TORCH_ARG(bool, meta) = true;
  /// How far results on other strides may be from those on contiguous tensors, relative and absolute.
  TORCH_ARG(double, tolerance) = 1e-6;
  /// For the gradients, where the operator has any.
  TORCH_ARG(GradcheckOptions, gradcheck) = {};
};

/// The operator `name` ("mine::scale") does on `arguments` what its schema and its registrations say:
/// - schema: an argument without (a!) is not written to, an output without (a) shares memory with none, and
///   one with (a) with the argument that has it; defaults need not be given;
/// - strides: tensors with gaps between their elements, transposed and expanded ones give the same values, in
///   outputs and in arguments that are written to, leave what lies in the gaps, and give the same gradients
///   for a gradient that flows in expanded;
/// - shapes: all of this holds without dimensions and without elements too, where the operator takes that;
/// - meta: the meta function gives sizes, strides and dtypes of the real outputs;
/// - gradients: with float64 tensors that require a gradient, gradcheck(); an operator with a floating output
///   and no autograd kernel at all is rejected, as its gradient would be lost without a word.
/// Arguments are copied, and stay as they are. An operator that draws random numbers does not repeat itself:
/// it is not one to check. Throws: UsageError for an unknown operator or arguments that its schema rejects;
/// CheckError.
void opcheck(const std::string& name, const std::vector<c10::IValue>& arguments,
             const OpcheckOptions& options = {});

}  // namespace cohort::ops

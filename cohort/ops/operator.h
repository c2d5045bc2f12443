#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/error.h"

/// Operators of one's own: defined once, known to LibTorch by name, differentiable.
///
///     TORCH_LIBRARY(mine, library) {
///       cohort::ops::define(library, "scale(Tensor x, float by) -> Tensor")
///           .cpu(&scale)
///           .meta(&scale_meta)
///           .backward([](const cohort::ops::Call& call, const std::vector<at::Tensor>& gradients) {
///             return std::vector<at::Tensor>{gradients[0] * call.argument<double>(1)};
///           });
///     }
///     static const auto scale = cohort::ops::find<at::Tensor(const at::Tensor&, double)>("mine::scale");
///     y = scale.call(x, 2.0);
///
/// docs/guide/ops.md says what each part promises; ops/check.h checks that the parts agree.
namespace cohort::ops {

/// A forward call, as its derivative sees it. Indices are those of the schema's arguments and returns.
class Call {
 public:
  /// Returns the tensor argument `index`; undefined where an optional one was not given.
  const at::Tensor& tensor(std::size_t index) const;
  /// Returns the argument `index`, "float" as double, "int" as std::int64_t, "Tensor[]" as
  /// std::vector<at::Tensor>.
  template <typename T>
  T argument(std::size_t index) const {
    return at(index).to<T>();
  }
  /// Returns the output `index`; only with Definition::save_outputs().
  const at::Tensor& output(std::size_t index = 0) const;
  /// False: nobody asked for the gradient of argument `index`, and backward may leave it undefined.
  bool needs_gradient(std::size_t index) const;

 private:
  friend struct CallParts;
  const c10::IValue& at(std::size_t index) const;

  std::string name_;
  std::vector<c10::IValue> arguments_;
  std::vector<at::Tensor> tensors_;  // of all arguments, in order
  std::vector<at::Tensor> outputs_;
  std::vector<bool> needs_gradient_;
};

/// Returns one gradient for each tensor among the arguments, in the schema's order (those of a list one after
/// the other), undefined where there is none; `gradients` has one for each tensor returned, zeros where
/// nothing flowed back. What it computes with differentiable operators can be differentiated again.
using Backward =
    std::function<std::vector<at::Tensor>(const Call& call, const std::vector<at::Tensor>& gradients)>;

/// For an operator with one output that works element by element: returns the partial derivative by each
/// tensor, in the output's shape. The gradient is multiplied with it and summed to the argument's shape.
using Derivative = std::function<std::vector<at::Tensor>(const Call& call)>;

/// What dtype an operator computes in under autocast. float64 and integers are never changed.
enum class Autocast {
  kNarrow,   ///< the scope's narrow dtype, as matrix products do
  kFloat32,  ///< float32, as sums and exponentials do
  kWidest,   ///< the widest among the tensors, so that mixed ones can meet
};

namespace detail {
struct Recipe;
void add_autocast(torch::Library& library, const std::string& name, Autocast rule);
}  // namespace detail

/// An operator that is being defined. Every call registers its part at once; what is not given is not there:
/// a device without a kernel is LibTorch's error, a gradient without backward() one that names the operator.
class Definition {
 public:
  /// Throws: c10::Error for a schema that cannot be read or a name that is taken; UsageError for an argument
  /// that holds tensors in another way than Tensor, Tensor? and Tensor[], as autograd would not see them.
  Definition(torch::Library& library, const std::string& schema, const std::vector<at::Tag>& tags = {});

  /// The kernel for a device: a function with the C++ types of the schema. It is called below autograd, with
  /// tensors of that device, any strides.
  template <typename Fn>
  Definition& cpu(Fn* kernel) {
    return this->kernel(c10::DispatchKey::CPU, kernel);
  }
  template <typename Fn>
  Definition& cuda(Fn* kernel) {
    return this->kernel(c10::DispatchKey::CUDA, kernel);
  }
  /// For every device that has no kernel of its own: for kernels made of LibTorch's operators.
  template <typename Fn>
  Definition& composite(Fn* kernel) {
    return this->kernel(c10::DispatchKey::CompositeExplicitAutograd, kernel);
  }
  /// Returns outputs of the right sizes, strides and dtype on the device meta, without any values: what
  /// planning of memory and shapes asks. Leave it out when sizes depend on values.
  template <typename Fn>
  Definition& meta(Fn* kernel) {
    return this->kernel(c10::DispatchKey::Meta, kernel);
  }
  /// The kernel for any other dispatch key.
  template <typename Fn>
  Definition& kernel(c10::DispatchKey key, Fn* function) {
    library_.impl(name_.c_str(), torch::dispatch(key, function));
    return *this;
  }

  /// Throws: UsageError for a schema that writes to or returns its arguments, or returns lists.
  Definition& backward(Backward function);
  /// Throws: as backward().
  Definition& derivative(Derivative function);
  /// Keeps the outputs for backward too, as a derivative that is simplest in terms of them wants.
  Definition& save_outputs();
  /// What the operator computes in under autocast; without it autocast leaves its arguments as they are.
  Definition& autocast(Autocast rule);

 private:
  torch::Library& library_;
  std::string name_;  // with the overload's
  std::shared_ptr<detail::Recipe> recipe_;
};

/// Defines `schema` ("scale(Tensor x, float by) -> Tensor") in `library`. An operator whose outputs' sizes
/// depend on values says so with at::Tag::dynamic_output_shape; without it script mode takes them for fixed.
inline Definition define(torch::Library& library, const std::string& schema,
                         const std::vector<at::Tag>& tags = {}) {
  return Definition(library, schema, tags);
}

/// Returns the operator `name`, "mine::scale" or "mine::scale.overload". Throws: UsageError if there is none.
c10::OperatorHandle find_operator(const std::string& name);

/// The same with the C++ types that it is called with. Throws: UsageError if its schema has others.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const std::string& name) {
  const c10::OperatorHandle found = find_operator(name);
  try {
    return found.typed<Signature>();
  } catch (const c10::Error& error) {
    throw UsageError(
        "ops.find", base::concat(name, " has other types: ", error.what_without_backtrace()),
        "the C++ types of its schema: Tensor is const at::Tensor&, int is std::int64_t, float is double");
  }
}

}  // namespace cohort::ops

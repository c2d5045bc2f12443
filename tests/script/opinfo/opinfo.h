#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string>
#include <vector>

/// Every operator of the dispatcher, and inputs that it takes, made from its schema: what opinfo_test.cpp
/// shows to script mode.
namespace cohort::test::opinfo {

using Tensors = std::vector<at::Tensor>;

/// An operator and arguments for it. Threads: one.
class Case {
 public:
  Case(c10::OperatorHandle op, torch::jit::Stack arguments);

  /// The tensors among the arguments, but for those that are there to be written to (out=), in order.
  const Tensors& inputs() const { return inputs_; }
  /// True for each of inputs() that the schema says is written to.
  const std::vector<bool>& is_written() const { return is_written_; }
  /// Calls the operator on `inputs`, and on new, empty tensors for out=. Returns what tensors it returned,
  /// and those for out=. Throws: what the operator throws.
  Tensors operator()(const Tensors& inputs) const;

 private:
  c10::OperatorHandle op_;
  torch::jit::Stack arguments_;
  Tensors inputs_;
  std::vector<bool> is_written_;
};

/// Cases of one operator: the same arguments but for the values of tensors.
struct Found {
  std::vector<Case> cases = {};
  std::string reason = {};  ///< why there is none

  /// Numbers of the inputs that have the same elements in all cases. What a recording took from such an input
  /// for a constant is not found.
  std::vector<std::size_t> fixed_inputs() const;
};

/// Names of all operators in namespace aten, sorted.
std::vector<c10::OperatorName> names();
/// Tries inputs of several shapes and types, until the operator takes one and computes a tensor from it.
Found find_inputs(const c10::OperatorHandle& op);

/// "aten::add.Tensor".
std::string text_of(const c10::OperatorName& name);
/// The name without namespace and overload: "add".
std::string base_of(const c10::OperatorName& name);

}  // namespace cohort::test::opinfo

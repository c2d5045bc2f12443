#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/script/tensors.h"

/// One operator that was called, and the values that it took and made: what a tape consists of.
namespace cohort::script {

/// True if `tensor` has these sizes and strides. A loop of its own: == of so few numbers would call memcmp(),
/// which costs more than they do.
inline bool is_laid_out(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const c10::IntArrayRef its_sizes = tensor.sizes();
  if (its_sizes.size() != sizes.size()) return false;
  const c10::IntArrayRef its_strides = tensor.strides();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (((its_sizes[i] ^ sizes[i]) | (its_strides[i] ^ strides[i])) != 0) return false;
  }
  return true;
}
inline bool is_laid_out(const at::Tensor& tensor, const Layout& layout) {
  return is_laid_out(tensor, layout.sizes, layout.strides);
}

/// Where a value comes from.
enum class Source : std::uint8_t {
  kInput,     ///< handed in with each run
  kCaptured,  ///< a tensor of the world: a parameter, a buffer; read and written where it lies
  kConstant,  ///< made in C++ by no operator, with the same contents in two recordings
  kMade,      ///< by an operator of the tape
};

/// A tensor on the tape: the slot is its number.
struct Value {
  Source source = Source::kMade;
  Layout layout;            ///< how it lies in that storage
  std::size_t storage = 0;  ///< values of one storage have one number
  at::Tensor tensor;        ///< where captured or constant
  bool snapshot = false;    ///< of what C++ wrote into a tensor that an operator made
};

/// In the order of Call::below_autocast.
inline constexpr std::array kAutocastKeys = {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA};

inline constexpr int kUndefined = -1;  ///< the slot of an undefined tensor
inline constexpr int kUnknown = -2;    ///< find(): not on the tape

/// A slot that is a value's, as an index.
inline std::size_t at_slot(int slot) {
  return static_cast<std::size_t>(slot);
}

/// Tensors of one argument or result of a call.
struct TensorPlace {
  /// What the argument's type is: Tensor, Tensor[], Tensor?[].
  enum class ArgumentType : std::uint8_t { kTensor, kList, kOptionalList };
  std::size_t index = 0;  ///< which argument or result
  ArgumentType kind = ArgumentType::kTensor;
  bool fresh_handle = false;  ///< the operator changes sizes or strides: it gets a handle of its own
  std::vector<int> slots;     ///< values
  bool operator==(const TensorPlace&) const = default;
};

/// One operator that was called.
struct OperatorCall {
  explicit OperatorCall(const c10::OperatorHandle& called, c10::DispatchKeySet below = {})
      : op(called), keys(below), is_custom_op(!called.operator_name().name.starts_with("aten::")) {}

  c10::OperatorHandle op;                ///< what was called
  c10::DispatchKeySet keys;              ///< below the recorder; empty: to be found anew
  std::vector<c10::IValue> arguments;    ///< none where tensors go
  std::vector<TensorPlace> inputs;       ///< by index
  std::vector<TensorPlace> results;      ///< by index
  std::vector<c10::IValue> other;        ///< results that are no tensors
  std::size_t num_results = 0;           ///< on the stack, tensors and others
  bool is_view = false;                  ///< results alias the first tensor and nothing is written
  bool grad_mode = false;                ///< whether gradients were on
  std::array<bool, 2> below_autocast{};  ///< autocast was off, or called it itself: on the CPU, on CUDA
  bool is_custom_op;                     ///< not LibTorch's: its results are checked in each run

  /// True if it makes a tensor as it comes, which needs no operator where memory is there.
  bool is_uninitialized_factory() const;
  /// True if it looks at sizes and type of its tensors, and not at their elements.
  bool reads_shape_only() const;
  /// True if it draws random numbers, or may: an operator that is not LibTorch's.
  bool may_draw() const;
  /// Returns "aten::addmm" or "aten::add.Tensor".
  std::string name() const;
};

/// True if two tensors have the same type, sizes and bits, NaN included. Undefined ones equal each other.
bool equal_bits(const at::Tensor& a, const at::Tensor& b);

/// Calls fn(slot) for each given value that the schema of `call` says it writes to.
template <typename Fn>
void each_written(const OperatorCall& call, const Fn& fn) {
  if (!call.op.schema().is_mutable()) return;
  for (const TensorPlace& place : call.inputs) {
    const c10::AliasInfo* const alias = call.op.schema().arguments()[place.index].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for (const int slot : place.slots) {
      if (slot >= 0) fn(slot);
    }
  }
}

/// Calls [begin, end) of a tape that script::fork() was given: they may run beside those that follow.
struct ForkedCalls {
  std::size_t begin = 0, end = 0;
  bool operator==(const ForkedCalls&) const = default;
};

}  // namespace cohort::script

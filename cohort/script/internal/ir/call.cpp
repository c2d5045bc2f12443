// Answers about a call on the tape: what its operator is known to do. Kinds of operators are told by names
// and tags, since schemas do not say them. Surprising: equality of tensors is that of bits. NaN equals the
// same NaN, and 0.0 differs from -0.0.
#include "cohort/script/internal/ir/call.h"

#include <ATen/ops/equal.h>

#include <algorithm>
#include <string_view>

namespace cohort::script {
namespace {

bool starts_with(const OperatorCall& call, std::string_view prefix) {
  return std::string_view(call.op.operator_name().name).substr(0, prefix.size()) == prefix;
}

}  // namespace

// The prefixes hold empty_like, empty_strided and new_empty_strided too.
bool OperatorCall::is_uninitialized_factory() const {
  return starts_with(*this, "aten::empty") || starts_with(*this, "aten::new_empty");
}

// zeros_like and new_zeros take a tensor for its sizes, type and device.
bool OperatorCall::reads_shape_only() const {
  const std::string& name = op.operator_name().name;
  return starts_with(*this, "aten::new_") || starts_with(*this, "aten::sym_") ||
         name == "aten::is_same_size" || (name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0);
}

bool OperatorCall::may_draw() const {
  const auto& arguments = op.schema().arguments();
  // One sign is enough: native_dropout has the tag and no generator argument.
  return is_custom_op || op.hasTag(at::Tag::nondeterministic_seeded) ||
         std::any_of(arguments.begin(), arguments.end(),
                     [](const c10::Argument& argument) { return argument.name() == "generator"; });
}

std::string OperatorCall::name() const {
  return c10::toString(op.operator_name());
}

bool equal_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto bytes = [](const at::Tensor& tensor) {
    // Dense first: gaps are no elements, and a lazy conjugation or negation is not in the bytes.
    const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().contiguous();
    return plain.as_strided({plain.numel()}, {1}).view(at::kByte);
  };
  return at::equal(bytes(a), bytes(b));
}

}  // namespace cohort::script

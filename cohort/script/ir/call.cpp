#include "cohort/script/ir/call.h"

#include <ATen/ops/equal.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::script {
namespace {

bool starts_with(const OperatorCall& call, std::string_view prefix) {
  return std::string_view(call.op.operator_name().name).substr(0, prefix.size()) == prefix;
}

}  // namespace

Layout Layout::of(const at::Tensor& tensor) {
  return {.sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .offset = tensor.storage_offset(),
          .dtype = tensor.scalar_type(),
          .device = tensor.device(),
          .conjugate = tensor.is_conj(),
          .negative = tensor.is_neg()};
}

std::int64_t Layout::bytes() const {
  return std::accumulate(sizes.begin(), sizes.end(), static_cast<std::int64_t>(c10::elementSize(dtype)),
                         std::multiplies<>());
}

bool Layout::may_overlap() const {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride and size
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return false;
    if (sizes[i] > 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::ranges::sort(dims);
  std::int64_t last = 0;  // the farthest element of the dimensions before
  for (const auto& [stride, size] : dims) {
    if (stride <= last) return true;
    last += stride * (size - 1);
  }
  return false;
}

std::string Layout::str() const {
  return base::concat(dtype, " ", c10::IntArrayRef(sizes));
}

bool OperatorCall::is_uninitialized_factory() const {
  return starts_with(*this, "aten::empty") || starts_with(*this, "aten::new_empty");
}

bool OperatorCall::reads_shape_only() const {
  const std::string& name = op.operator_name().name;
  return starts_with(*this, "aten::new_") || starts_with(*this, "aten::sym_") ||
         name == "aten::is_same_size" || (name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0);
}

bool OperatorCall::may_draw() const {
  const auto& arguments = op.schema().arguments();
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
    const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().contiguous();
    return plain.as_strided({plain.numel()}, {1}).view(at::kByte);
  };
  return at::equal(bytes(a), bytes(b));
}

}  // namespace cohort::script

// Backends of Cohort's own (shm, MPI) work on memory and not on tensors. Here tensors are checked, and become
// pointers, bytes and element types. A check throws c10::Error before anything travels. Complex numbers are
// added up as pairs of real ones; other operations have kernels of their own for them. PREMUL_SUM is the sum
// of tensors that were scaled first. Always: what passes the checks is dense memory on the CPU, so a pointer
// and a number of bytes say all.
#include "cohort/comm/internal/tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <numeric>
#include <ostream>

namespace cohort::comm {
namespace {

Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kComplexFloat:
      return Dtype::kFloat;
    case at::kDouble:
    case at::kComplexDouble:
      return Dtype::kDouble;
    case at::kHalf:
    case at::kComplexHalf:
      return Dtype::kHalf;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kChar:
      return Dtype::kInt8;
    case at::kByte:
      return Dtype::kUint8;
    case at::kShort:
      return Dtype::kInt16;
    case at::kUInt16:
      return Dtype::kUint16;
    case at::kInt:
      return Dtype::kInt32;
    case at::kUInt32:
      return Dtype::kUint32;
    case at::kLong:
      return Dtype::kInt64;
    case at::kUInt64:
      return Dtype::kUint64;
    case at::kBool:
      return Dtype::kBool;
    default:
      // A type without kernels still moves: reduction_type_of() rejects it for reductions only.
      return Dtype::kBytes;
  }
}

Dtype complex_of(Dtype part) {
  // There are no kernels for products of complex half numbers.
  if (part == Dtype::kFloat) return Dtype::kComplexFloat;
  return part == Dtype::kDouble ? Dtype::kComplexDouble : Dtype::kBytes;
}

Op op_of(const CallSite& caller, c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    // The tensors have been through scale() or scaled() before.
    case c10d::ReduceOp::PREMUL_SUM:
      return Op::kSum;
    case c10d::ReduceOp::AVG:
      return Op::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return Op::kProduct;
    case c10d::ReduceOp::MIN:
      return Op::kMin;
    case c10d::ReduceOp::MAX:
      return Op::kMax;
    case c10d::ReduceOp::BAND:
      return Op::kAnd;
    case c10d::ReduceOp::BOR:
      return Op::kOr;
    case c10d::ReduceOp::BXOR:
      return Op::kXor;
    default:
      TORCH_CHECK(false, caller, " does not support reduce operation ", static_cast<int>(op));
  }
}

bool is_scaled(const c10d::ReduceOp& op) {
  return static_cast<c10d::ReduceOp::RedOpType>(op) == c10d::ReduceOp::PREMUL_SUM;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const CallSite& caller) {
  return out << "Backend " << caller.backend << ": " << caller.call;
}

std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

Span span_of(const at::Tensor& tensor) {
  return {data_of(tensor), tensor.nbytes()};
}

std::vector<std::byte*> pointers(std::span<const at::Tensor> tensors) {
  std::vector<std::byte*> list;
  list.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) list.push_back(data_of(tensor));
  return list;
}

void check_tensor(const CallSite& caller, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().is_cpu(), caller, ": got a tensor on ", tensor.device(),
              ", expected one on the CPU");
  TORCH_CHECK(tensor.layout() == at::kStrided, caller, ": got a sparse tensor, expected a dense one");
  // A backend sees a pointer and bytes, and could not skip the gaps of a strided tensor.
  TORCH_CHECK(tensor.is_contiguous(), caller, ": got a tensor of strides ", tensor.strides(),
              ", expected a contiguous one");
}

void check_tensors(const CallSite& caller, const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) check_tensor(caller, tensor);
}

void check_any(const CallSite& caller, const Tensors& tensors) {
  TORCH_CHECK(!tensors.empty(), caller, ": got no tensors, expected one at least");
  check_tensors(caller, tensors);
}

const at::Tensor& check_one(const CallSite& caller, const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, caller, ": got ", tensors.size(), " tensors, expected one");
  check_tensor(caller, tensors[0]);
  return tensors[0];
}

void check_alike(const CallSite& caller, const at::Tensor& large, const at::Tensor& small, int times) {
  check_tensor(caller, large);
  check_tensor(caller, small);
  TORCH_CHECK(large.scalar_type() == small.scalar_type() && large.numel() == small.numel() * times, caller,
              ": got ", large.scalar_type(), large.sizes(), " beside ", small.scalar_type(), small.sizes(),
              ", expected one type and ", times, " times as many numbers");
}

void check_same_type(const CallSite& caller, const at::Tensor& output, const at::Tensor& input) {
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), caller, ": got ", input.scalar_type(),
              " to exchange for ", output.scalar_type(), ", expected one type");
}

void check_as_many(const CallSite& caller, std::size_t outputs, std::size_t inputs) {
  TORCH_CHECK(outputs == inputs && inputs > 0, caller, ": got ", outputs, " outputs and ", inputs,
              " inputs, expected as many of both");
}

void check_one_each(const CallSite& caller, const Tensors& tensors, int size) {
  TORCH_CHECK(tensors.size() == static_cast<std::size_t>(size), caller, ": got ", tensors.size(),
              " tensors, expected one for each of ", size, " ranks");
  check_tensors(caller, tensors);
}

void check_list(const CallSite& caller, const TensorLists& lists, const at::Tensor& like, int size) {
  TORCH_CHECK(lists.size() == 1, caller, ": got ", lists.size(), " lists of tensors, expected one");
  check_one_each(caller, lists[0], size);
  for (const at::Tensor& tensor : lists[0]) check_alike(caller, tensor, like);
}

int check_rank(const CallSite& caller, std::int64_t rank, int size) {
  TORCH_CHECK(rank >= 0 && rank < size, caller, ": got rank ", rank, ", expected 0 to ", size - 1);
  return static_cast<int>(rank);
}

namespace {

// c10d has no other place for the factor, though the class is named after NCCL. Null: there is none.
const c10d::NCCLPreMulSumSupplement* factor_of(const c10d::ReduceOp& op) {
  return dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
}

}  // namespace

ReductionType reduction_type_of(const CallSite& caller, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  ReductionType numbers{.dtype = dtype_of(tensor), .op = op_of(caller, op)};
  if (tensor.is_complex()) {
    if (numbers.op == Op::kSum || numbers.op == Op::kAvg) {
      // A sum has no mixed terms, so real and imaginary parts are added as numbers of their own.
      numbers.per_element = 2;
    } else {
      numbers.dtype = complex_of(numbers.dtype);
    }
  }
  if (is_scaled(op)) {
    TORCH_CHECK(factor_of(op) != nullptr, caller, ": PREMUL_SUM without a factor");
    // A factor of 0.5 would become 0.
    TORCH_CHECK(tensor.is_floating_point() || tensor.is_complex(), caller, " does not support PREMUL_SUM of ",
                tensor.scalar_type());
  }
  TORCH_CHECK(can_reduce(numbers.dtype, numbers.op), caller, " does not support ", name_of(numbers.op),
              " of ", tensor.scalar_type());
  return numbers;
}

void scale(const CallSite& caller, at::Tensor tensor, const c10d::ReduceOp& op) {
  if (!is_scaled(op)) return;
  const auto* const factor = factor_of(op);
  TORCH_CHECK(factor != nullptr, caller, ": PREMUL_SUM without a factor");
  const at::NoGradGuard no_grad;
  if (factor->tensor_factor.defined()) {
    tensor.mul_(factor->tensor_factor.to(tensor.scalar_type()));
  } else {
    tensor.mul_(factor->double_factor);
  }
}

at::Tensor scaled(const CallSite& caller, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (!is_scaled(op)) return tensor;
  // The input is the caller's, and stays as it is.
  at::Tensor copy = tensor.clone();
  scale(caller, copy, op);
  return copy;
}

// Of equal size: check_alike() has seen that the numbers divide.
std::vector<std::byte*> parts_of(const at::Tensor& tensor, int count) {
  std::vector<std::byte*> list;
  const std::size_t bytes = tensor.nbytes() / static_cast<std::size_t>(count);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
    list.push_back(data_of(tensor) + i * bytes);
  return list;
}

std::vector<Span> rows_of(const CallSite& caller, const at::Tensor& tensor,
                          const std::vector<std::int64_t>& rows, int size) {
  check_tensor(caller, tensor);
  const std::int64_t length = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<std::int64_t> counts = rows;
  if (counts.empty()) {
    TORCH_CHECK(length % size == 0, caller, ": got ", length, " rows, which do not divide by ", size,
                " ranks");
    counts.assign(static_cast<std::size_t>(size), length / size);
  }
  TORCH_CHECK(static_cast<int>(counts.size()) == size &&
                  std::ranges::none_of(counts, [](std::int64_t n) { return n < 0; }) &&
                  std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == length,
              caller, ": got parts of ", at::IntArrayRef(counts), " rows, expected ", length, " in all for ",
              size, " ranks");
  const std::size_t row_bytes = length == 0 ? 0 : tensor.nbytes() / static_cast<std::size_t>(length);
  std::vector<Span> parts;
  std::byte* data = data_of(tensor);
  for (const std::int64_t count : counts) {
    const std::size_t bytes = row_bytes * static_cast<std::size_t>(count);
    parts.push_back({data, bytes});
    data += bytes;
  }
  return parts;
}

}  // namespace cohort::comm

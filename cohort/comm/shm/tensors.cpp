#include "cohort/comm/shm/tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>

namespace cohort::comm::shm {
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
      return Dtype::kBytes;
  }
}

Dtype complex_of(Dtype part) {
  if (part == Dtype::kFloat) return Dtype::kComplexFloat;
  return part == Dtype::kDouble ? Dtype::kComplexDouble : Dtype::kBytes;
}

}  // namespace

std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

Span span_of(const at::Tensor& tensor) {
  return {data_of(tensor), tensor.nbytes()};
}

void check_tensor(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().is_cpu(), "Backend shm: got a tensor on ", tensor.device(),
              ", expected one on the CPU");
  TORCH_CHECK(tensor.layout() == at::kStrided, "Backend shm: got a sparse tensor, expected a dense one");
  TORCH_CHECK(tensor.is_contiguous(), "Backend shm: got a tensor of strides ", tensor.strides(),
              ", expected a contiguous one");
}

void check_tensors(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) check_tensor(tensor);
}

void check_one(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "Backend shm: got ", tensors.size(), " tensors, expected one");
  check_tensor(tensors[0]);
}

void check_alike(const at::Tensor& tensor, const at::Tensor& like) {
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type() && tensor.numel() == like.numel(),
              "Backend shm: got ", tensor.scalar_type(), tensor.sizes(), " beside ", like.scalar_type(),
              like.sizes(), ", expected one type and as many numbers");
}

// One list of `size` tensors like `like`.
void check_list(const TensorLists& lists, const at::Tensor& like, int size) {
  TORCH_CHECK(lists.size() == 1 && lists[0].size() == static_cast<std::size_t>(size),
              "Backend shm: expected one list of ", size, " tensors, one for each rank");
  for (const at::Tensor& tensor : lists[0]) {
    check_tensor(tensor);
    check_alike(tensor, like);
  }
}

Numbers numbers_of(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
  Numbers numbers{.dtype = dtype_of(tensor), .op = Op::kSum};
  switch (kind) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:
      break;
    case c10d::ReduceOp::AVG:
      numbers.op = Op::kAvg;
      break;
    case c10d::ReduceOp::PRODUCT:
      numbers.op = Op::kProduct;
      break;
    case c10d::ReduceOp::MIN:
      numbers.op = Op::kMin;
      break;
    case c10d::ReduceOp::MAX:
      numbers.op = Op::kMax;
      break;
    case c10d::ReduceOp::BAND:
      numbers.op = Op::kAnd;
      break;
    case c10d::ReduceOp::BOR:
      numbers.op = Op::kOr;
      break;
    case c10d::ReduceOp::BXOR:
      numbers.op = Op::kXor;
      break;
    default:
      TORCH_CHECK(false, "Backend shm does not support reduce operation ", static_cast<int>(kind));
  }
  if (tensor.is_complex()) {
    if (numbers.op == Op::kSum || numbers.op == Op::kAvg) {
      numbers.per_element = 2;
    } else {
      numbers.dtype = complex_of(numbers.dtype);
    }
  }
  TORCH_CHECK(kernels().reduce[static_cast<int>(numbers.dtype)][static_cast<int>(numbers.op)] != nullptr,
              "Backend shm does not support ", name_of(numbers.op), " of ", tensor.scalar_type());
  return numbers;
}

// What each rank's own factor makes of its input: PREMUL_SUM.
void scale(at::Tensor tensor, const c10d::ReduceOp& op) {
  if (static_cast<c10d::ReduceOp::RedOpType>(op) != c10d::ReduceOp::PREMUL_SUM) return;
  const auto* factor = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(factor != nullptr, "Backend shm: PREMUL_SUM without a factor");
  const at::NoGradGuard no_grad;
  if (factor->tensor_factor.defined()) {
    tensor.mul_(factor->tensor_factor.to(tensor.scalar_type()));
  } else {
    tensor.mul_(factor->double_factor);
  }
}

bool is_scaled(const c10d::ReduceOp& op) {
  return static_cast<c10d::ReduceOp::RedOpType>(op) == c10d::ReduceOp::PREMUL_SUM;
}

std::vector<std::byte*> pointers(const Tensors& tensors) {
  std::vector<std::byte*> list;
  for (const at::Tensor& tensor : tensors) list.push_back(data_of(tensor));
  return list;
}

// A tensor as `count` parts of equal size, one after the other.
std::vector<std::byte*> parts_of(const at::Tensor& tensor, int count) {
  std::vector<std::byte*> list;
  const std::size_t bytes = tensor.nbytes() / static_cast<std::size_t>(count);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
    list.push_back(data_of(tensor) + i * bytes);
  return list;
}

// Dimension 0 of a tensor, split into `rows`; equally when there are none.
std::vector<Span> rows_of(const at::Tensor& tensor, const std::vector<std::int64_t>& rows, int size) {
  std::vector<Span> parts;
  std::byte* data = data_of(tensor);
  const std::int64_t length = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (rows.empty()) {
    TORCH_CHECK(length % size == 0, "Backend shm: ", length, " rows cannot be split equally among ", size,
                " ranks");
    const std::size_t bytes = tensor.nbytes() / static_cast<std::size_t>(size);
    for (int i = 0; i < size; ++i, data += bytes) parts.push_back({data, bytes});
    return parts;
  }
  std::int64_t sum = 0;
  for (const std::int64_t count : rows) sum += count;
  TORCH_CHECK(rows.size() == static_cast<std::size_t>(size) && sum == length, "Backend shm: got ",
              rows.size(), " parts of ", sum, " rows in all, expected ", size, " of ", length);
  const std::size_t row_bytes = length == 0 ? 0 : tensor.nbytes() / static_cast<std::size_t>(length);
  for (const std::int64_t count : rows) {
    const std::size_t bytes = row_bytes * static_cast<std::size_t>(count);
    parts.push_back({data, bytes});
    data += bytes;
  }
  return parts;
}

}  // namespace cohort::comm::shm

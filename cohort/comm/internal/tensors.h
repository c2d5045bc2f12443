#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "cohort/comm/internal/kernels/kernels.h"

/// Tensors as memory that backends of our own work on. What cannot be is rejected by c10::Error naming
/// backend and call, before anything travels.
namespace cohort::comm {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

/// Who asks: "Backend shm: all_reduce".
struct CallSite {
  const char* backend;
  const char* call;
};
std::ostream& operator<<(std::ostream& out, const CallSite& caller);

std::byte* data_of(const at::Tensor& tensor);
Span span_of(const at::Tensor& tensor);
std::vector<std::byte*> pointers(std::span<const at::Tensor> tensors);

/// On the CPU, dense, contiguous.
void check_tensor(const CallSite& caller, const at::Tensor& tensor);
void check_tensors(const CallSite& caller, const Tensors& tensors);
/// The same, and one at least.
void check_any(const CallSite& caller, const Tensors& tensors);
/// Returns the only one.
const at::Tensor& check_one(const CallSite& caller, const Tensors& tensors);
/// Both as check_tensor() asks, of one type, and `large` has `times` as many numbers as `small`.
void check_alike(const CallSite& caller, const at::Tensor& large, const at::Tensor& small, int times = 1);
void check_same_type(const CallSite& caller, const at::Tensor& output, const at::Tensor& input);
/// As many of both, one at least.
void check_as_many(const CallSite& caller, std::size_t outputs, std::size_t inputs);
/// One for each of `size` ranks.
void check_one_each(const CallSite& caller, const Tensors& tensors, int size);
/// One list of one for each rank, like `like`.
void check_list(const CallSite& caller, const TensorLists& lists, const at::Tensor& like, int size);
/// Returns `rank`, which is below `size`.
int check_rank(const CallSite& caller, std::int64_t rank, int size);

/// How a tensor is reduced: a complex number that is added up is two.
struct ReductionType {
  Dtype dtype = Dtype::kBytes;
  Op op = Op::kNone;
  std::size_t per_element = 1;

  std::size_t numel(const at::Tensor& tensor) const {
    return static_cast<std::size_t>(tensor.numel()) * per_element;
  }
};
/// PREMUL_SUM is the sum of what scale() gives.
ReductionType reduction_type_of(const CallSite& caller, const at::Tensor& tensor, const c10d::ReduceOp& op);

/// Multiplies in place by this rank's own factor where `op` is PREMUL_SUM.
void scale(const CallSite& caller, at::Tensor tensor, const c10d::ReduceOp& op);
/// A multiplied copy where it is; else the tensor itself.
at::Tensor scaled(const CallSite& caller, const at::Tensor& tensor, const c10d::ReduceOp& op);

/// A tensor as `count` parts of equal size, one after the other.
std::vector<std::byte*> parts_of(const at::Tensor& tensor, int count);
/// Dimension 0 of a tensor, split into `rows`, one number for each of `size` ranks; equally when there are
/// none.
std::vector<Span> rows_of(const CallSite& caller, const at::Tensor& tensor,
                          const std::vector<std::int64_t>& rows, int size);

}  // namespace cohort::comm

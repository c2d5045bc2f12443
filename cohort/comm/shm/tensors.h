#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "cohort/comm/shm/collectives.h"

/// Tensors as memory that collectives work on. What cannot be is refused by c10::Error, before anything
/// travels.
namespace cohort::comm::shm {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

std::byte* data_of(const at::Tensor& tensor);
Span span_of(const at::Tensor& tensor);

/// On the CPU, dense, contiguous.
void check_tensor(const at::Tensor& tensor);
void check_tensors(const Tensors& tensors);
void check_one(const Tensors& tensors);
/// One type and as many numbers.
void check_alike(const at::Tensor& tensor, const at::Tensor& like);
/// One list of `size` tensors like `like`.
void check_list(const TensorLists& lists, const at::Tensor& like, int size);

/// How a tensor is reduced: a complex number that is added up is two.
struct Numbers {
  Dtype dtype;
  Op op;
  std::size_t per_element = 1;

  std::size_t numel(const at::Tensor& tensor) const {
    return static_cast<std::size_t>(tensor.numel()) * per_element;
  }
};
Numbers numbers_of(const at::Tensor& tensor, const c10d::ReduceOp& op);

/// PREMUL_SUM: each rank has a factor of its own.
bool is_scaled(const c10d::ReduceOp& op);
/// Multiplies in place by the factor, if there is one.
void scale(at::Tensor tensor, const c10d::ReduceOp& op);

std::vector<std::byte*> pointers(const Tensors& tensors);
/// A tensor as `count` parts of equal size, one after the other.
std::vector<std::byte*> parts_of(const at::Tensor& tensor, int count);
/// Dimension 0 of a tensor, split into `rows`; equally when there are none.
std::vector<Span> rows_of(const at::Tensor& tensor, const std::vector<std::int64_t>& rows, int size);

}  // namespace cohort::comm::shm

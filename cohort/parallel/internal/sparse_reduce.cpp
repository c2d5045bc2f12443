#include "cohort/parallel/internal/sparse_reduce.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "cohort/parallel/internal/coalesce.h"

namespace cohort::parallel {
namespace {

// The first rows[r] rows of each rank's `most`, one after the other.
at::Tensor joined(const at::Tensor& all, const std::vector<std::int64_t>& rows, std::int64_t most) {
  std::vector<at::Tensor> parts;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    parts.push_back(all.narrow(0, static_cast<std::int64_t>(r) * most, rows[r]));
  }
  return at::cat(parts);
}

}  // namespace

at::Tensor reduce_sparse(const comm::Group& group, const at::Tensor& gradient, const at::Tensor& parameter,
                         double scale, std::chrono::milliseconds timeout) {
  const std::int64_t size = group.size();
  // Rows that repeat are added here, so that fewer travel.
  const at::Tensor own = gradient.defined() ? gradient.coalesce() : at::Tensor();
  // What all must know first: rows here, and how many dimensions they are indexed by (0: no rows).
  const std::int64_t own_rows = own.defined() ? own._nnz() : 0;
  const std::int64_t own_dims = own.defined() ? own.sparse_dim() : 0;
  at::Tensor facts = at::empty({2 * size}, at::kLong), fact = at::full({2}, own_rows, at::kLong);
  fact[1] = own_dims;
  group.all_gather(facts, fact, {timeout}).wait();
  std::vector<std::int64_t> rows;
  std::int64_t most = 0, dims = 0;
  for (std::int64_t r = 0; r < size; ++r) {
    rows.push_back(facts[2 * r].item<std::int64_t>());
    most = std::max(most, rows.back());
    dims = std::max(dims, facts[2 * r + 1].item<std::int64_t>());
  }
  if (dims == 0) dims = 1;  // nobody has any

  // all_gather wants equal shapes: ranks with fewer rows pad them, and joined() cuts that off.
  std::vector<std::int64_t> shape{most};
  for (std::int64_t d = dims; d < parameter.dim(); ++d) shape.push_back(parameter.size(d));
  const at::TensorOptions numbers = parameter.options().requires_grad(false);
  at::Tensor indices = at::zeros({most, dims}, numbers.dtype(at::kLong)), values = at::zeros(shape, numbers);
  if (own_rows > 0) {
    indices.narrow(0, 0, own_rows).copy_(own.indices().t());
    scale_into(values.narrow(0, 0, own_rows), own.values(), scale);
  }
  shape[0] *= size;
  at::Tensor all_indices = at::empty({size * most, dims}, indices.options()),
             all_values = at::empty(shape, numbers);
  if (most > 0) {
    auto pending = group.all_gather(all_indices, indices, {timeout});
    group.all_gather(all_values, values, {timeout}).wait();
    pending.wait();
  }
  return at::_sparse_coo_tensor_unsafe(joined(all_indices, rows, most).t().contiguous(),
                                       joined(all_values, rows, most), parameter.sizes())
      .coalesce();
}

}  // namespace cohort::parallel

#include "cohort/parallel/internal/coalesce.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include "cohort/base/error.h"

namespace cohort::parallel {

std::string kind_of(const at::Tensor& tensor) {
  return base::concat(tensor.dtype().name(), " ", tensor.device().str());
}

std::vector<at::Tensor> views_of(const at::Tensor& flat, std::span<const at::Tensor> like) {
  std::vector<at::Tensor> pieces;
  std::int64_t at = 0;
  for (const at::Tensor& tensor : like) {
    pieces.push_back(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()));
    at += tensor.numel();
  }
  return pieces;
}

void scale_into(const at::Tensor& out, const at::Tensor& gradient, double scale) {
  at::Tensor factor = at::scalar_tensor(scale, at::kDouble);
  // As a number of C++, which does not make the result of half gradients a double.
  factor.unsafeGetTensorImpl()->set_wrapped_number(true);
  at::Tensor into = out;
  at::mul_out(into, gradient, factor);
}

std::int64_t total_numel(std::span<const at::Tensor> tensors) {
  std::int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) numel += tensor.numel();
  return numel;
}

}  // namespace cohort::parallel

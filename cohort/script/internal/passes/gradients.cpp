#include "cohort/script/internal/passes/gradients.h"

#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace cohort::script {

std::vector<bool> defined(const Tensors& tensors) {
  std::vector<bool> result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.defined());
  return result;
}

bool is_reached(const std::vector<bool>& reached_from, const std::vector<bool>& is_given) {
  for (std::size_t i = 0; i < is_given.size(); ++i) {
    if (is_given[i] && reached_from[i]) return true;
  }
  return false;
}

at::Tensor materialized(const at::Tensor& gradient) {
  if (gradient._is_zerotensor()) return at::zeros(gradient.sizes(), gradient.options());
  const at::Tensor dense = gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
  return dense.resolve_conj().resolve_neg();
}

bool has_implicit_zeros(const Tensors& gradients) {
  return std::ranges::any_of(gradients, [](const at::Tensor& gradient) {
    return gradient.defined() && (gradient._is_zerotensor() || gradient.layout() != at::kStrided);
  });
}

bool all_finite(const Tensors& tensors) {
  return std::ranges::all_of(tensors, [](const at::Tensor& tensor) {
    if (!tensor.defined()) return true;
    // inf and NaN survive a sum, and one number a tensor is what a GPU is waited for.
    const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
    return std::isfinite(at::sum(real, at::kDouble).item<double>());
  });
}

bool is_none(const std::vector<bool>& is_given) {
  return std::ranges::none_of(is_given, std::identity());
}

}  // namespace cohort::script

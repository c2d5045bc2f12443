// The norm is the norm of the gradients' norms, with a foreach call for each device and type. Gradients are
// scaled by the same rounded factor as PyTorch's, and on the CPU not touched where it is 1. On an accelerator
// they are multiplied anyway, because a look at the factor would wait for it. Where the norm overflows though
// every element is finite, the CPU divides by the largest element first.
#include "cohort/optim/clip.h"

#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <limits>

#include "cohort/base/error.h"

namespace cohort::optim {
namespace {

using base::concat;

void append_gradients(const std::vector<at::Tensor>& parameters, std::vector<at::Tensor>& gradients) {
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined() || gradient._is_zerotensor()) continue;  // no memory to write to, and no norm
    if (gradient.layout() != at::kStrided)
      throw UsageError("optim.clip", concat("a gradient is sparse: layout ", gradient.layout()),
                       "an embedding with sparse(false)");
    gradients.push_back(gradient);
  }
}

// One call per device and dtype, as foreach operators want it; `visit` gets each list once.
template <typename Visit>
void by_kind(const std::vector<at::Tensor>& tensors, const Visit& visit) {
  std::vector<bool> done(tensors.size(), false);
  std::vector<at::Tensor> list;
  for (std::size_t first = 0; first < tensors.size(); ++first) {
    if (done[first]) continue;
    list.clear();
    for (std::size_t k = first; k < tensors.size(); ++k) {
      if (done[k] || tensors[k].dtype() != tensors[first].dtype() ||
          tensors[k].device() != tensors[first].device())
        continue;
      done[k] = true;
      list.push_back(tensors[k]);
    }
    visit(list);
  }
}

at::Tensor total_norm(const std::vector<at::Tensor>& gradients, double norm_type) {
  std::vector<at::Tensor> norms;
  norms.reserve(gradients.size());
  const at::Device device = gradients[0].device();
  by_kind(gradients, [&](const std::vector<at::Tensor>& list) {
    for (at::Tensor& norm : at::_foreach_norm(list, norm_type)) norms.push_back(norm.to(device));
  });
  // For any p above 0 the p-norm of the parts' p-norms is the p-norm of the whole. So one number for each
  // gradient goes to the first device, not the gradients.
  return at::linalg_vector_norm(at::stack(norms), norm_type);
}

// Foreach operators of LibTorch write to no lazily negative tensor: `single` does.
template <typename Foreach, typename Single>
void change(const std::vector<at::Tensor>& gradients, const Foreach& foreach, const Single& single) {
  std::vector<at::Tensor> plain;
  for (at::Tensor gradient : gradients) {
    if (gradient.is_neg()) {
      single(gradient);
    } else {
      plain.push_back(std::move(gradient));
    }
  }
  by_kind(plain, foreach);
}

void check_limit(double max_norm) {
  if (!(max_norm >= 0))
    throw UsageError("optim.clip_grad_norm_", concat("max_norm is ", max_norm, ", expected 0 or more"));
}

void scale_to(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, double max_norm) {
  // As PyTorch rounds it: max_norm / (norm + 1e-6) in the norm's dtype. A factor of 1 changes nothing: on the
  // CPU, where it is known, gradients are not touched; an accelerator multiplies, so that nobody waits for
  // it.
  const at::Tensor factor = norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0);
  if (factor.is_cpu() && factor.item<double>() == 1.0) return;
  change(
      gradients,
      [&](const std::vector<at::Tensor>& list) { at::_foreach_mul_(list, factor.to(list[0].device())); },
      [&](at::Tensor& gradient) { gradient.mul_(factor.to(gradient.device())); });
}

// Finite gradients of 1e20 have a norm beyond float. Scaled to 1 first, they have one.
void scale_down_to(const std::vector<at::Tensor>& gradients, double max_norm) {
  const double largest = total_norm(gradients, std::numeric_limits<double>::infinity()).item<double>();
  change(
      gradients, [&](const std::vector<at::Tensor>& list) { at::_foreach_div_(list, largest); },
      [&](at::Tensor& gradient) { gradient.div_(largest); });
  const double norm = total_norm(gradients, 2.0).item<double>();
  // A factor of `largest` restores the gradients: the norm was within the limit, only the sum of squares was
  // not.
  const double factor = max_norm / norm < largest ? max_norm / norm : largest;
  change(
      gradients, [&](const std::vector<at::Tensor>& list) { at::_foreach_mul_(list, factor); },
      [&](at::Tensor& gradient) { gradient.mul_(factor); });
}

double clip(const std::vector<at::Tensor>& gradients, double max_norm, double norm_type,
            bool error_if_nonfinite) {
  check_limit(max_norm);
  if (gradients.empty()) return 0.0;
  c10::NoGradGuard no_grad;
  const at::Tensor norm = total_norm(gradients, norm_type);
  // Before the first write, so that an error leaves the gradients as they were.
  if (error_if_nonfinite && !std::isfinite(norm.item<double>()))
    throw UsageError(
        "optim.clip_grad_norm_",
        concat("the norm of the gradients is ", norm.item<double>(), ", so they cannot be clipped"),
        "a smaller learning rate, or error_if_nonfinite = false");
  scale_to(gradients, norm, max_norm);
  return norm.item<double>();
}

}  // namespace

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  std::vector<at::Tensor> gradients;
  append_gradients(parameters, gradients);
  return clip(gradients, max_norm, norm_type, error_if_nonfinite);
}

double clip_grad_norm_(const std::vector<ParamGroup>& groups, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  std::vector<at::Tensor> gradients;
  for (const ParamGroup& group : groups) append_gradients(group.params, gradients);
  return clip(gradients, max_norm, norm_type, error_if_nonfinite);
}

NonFinite clip_grad_norm_unless_non_finite_(const std::vector<ParamGroup>& groups, double max_norm) {
  check_limit(max_norm);
  std::vector<at::Tensor> gradients;
  for (const ParamGroup& group : groups) append_gradients(group.params, gradients);
  if (gradients.empty()) return {};
  c10::NoGradGuard no_grad;
  const at::Tensor norm = total_norm(gradients, 2.0);
  if (norm.is_cpu() && std::isfinite(norm.item<double>())) {
    scale_to(gradients, norm, max_norm);
    return {};
  }
  // The norm may be beyond what its type holds where every gradient is finite: elements decide.
  const NonFinite found = find_non_finite(groups);
  // The flag is not known here yet. If it says not finite, the step is not made and these gradients are never
  // used.
  if (!norm.is_cpu()) {
    scale_to(gradients, norm, max_norm);
  } else if (!found.on_cpu) {
    scale_down_to(gradients, max_norm);
  }
  return found;
}

double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  std::vector<at::Tensor> gradients;
  append_gradients(parameters, gradients);
  if (gradients.empty()) return 0.0;
  c10::NoGradGuard no_grad;
  return total_norm(gradients, norm_type).item<double>();
}

void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  if (!(clip_value >= 0))
    throw UsageError("optim.clip_grad_value_", concat("clip_value is ", clip_value, ", expected 0 or more"));
  c10::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  append_gradients(parameters, gradients);
  for (at::Tensor& gradient : gradients) gradient.clamp_(-clip_value, clip_value);
}

}  // namespace cohort::optim

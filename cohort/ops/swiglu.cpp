// Forward and backward are operators of their own, each a single parallel pass over contiguous memory.
// Backward computes the sigmoid again, so only gate and up are kept. The derivative of backward is written
// with LibTorch's operators, which makes all further derivatives follow. SwiGLU is silu(gate) * up: Shazeer
// 2020, "GLU Variants Improve Transformer", equation 6.
#include "cohort/ops/swiglu.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>

#include <tuple>

#include "cohort/core/parallel.h"
#include "cohort/ops/internal/swiglu_kernel.h"
#include "cohort/ops/operator.h"

namespace cohort::ops {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;
// Elements for each thread; with less, starting threads costs more than the pass.
constexpr std::int64_t kGrain = 1 << 15;

void check(const at::Tensor& gate, const at::Tensor& other, const char* name) {
  if (gate.sizes() == other.sizes() && gate.scalar_type() == other.scalar_type()) return;
  throw UsageError("ops.swiglu",
                   base::concat("gate is ", gate.scalar_type(), " ", gate.sizes(), ", ", name, " ",
                                other.scalar_type(), " ", other.sizes(), "; expected the same"));
}

/// Calls fn with a null pointer of the type that the kernels know the dtype by.
template <typename Fn>
void with_type(at::ScalarType dtype, const Fn& fn) {
  switch (dtype) {
    case at::kFloat:
      return fn(static_cast<float*>(nullptr));
    case at::kDouble:
      return fn(static_cast<double*>(nullptr));
    case at::kBFloat16:
      return fn(static_cast<std::uint16_t*>(nullptr));
    default:
      throw UsageError("ops.swiglu", base::concat("got ", dtype, ", expected float32, float64 or bfloat16"));
  }
}

at::Tensor empty_for(const at::Tensor& gate) {
  return at::empty(gate.sizes(), gate.options());
}

at::Tensor forward_cpu(const at::Tensor& gate, const at::Tensor& up) {
  check(gate, up, "up");
  const at::Tensor a = gate.contiguous(), b = up.contiguous();
  at::Tensor out = empty_for(gate);
  with_type(gate.scalar_type(), [&]<typename T>(T*) {
    const auto* pa = static_cast<const T*>(a.const_data_ptr());
    const auto* pb = static_cast<const T*>(b.const_data_ptr());
    auto* po = static_cast<T*>(out.mutable_data_ptr());
    core::parallel_for(a.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      detail::swiglu_forward(pa + begin, pb + begin, po + begin, end - begin);
    });
  });
  return out;
}

at::Tensor forward_meta(const at::Tensor& gate, const at::Tensor& up) {
  check(gate, up, "up");
  return empty_for(gate);
}

Pair backward_cpu(const at::Tensor& gradient, const at::Tensor& gate, const at::Tensor& up) {
  check(gate, up, "up");
  check(gate, gradient, "gradient");
  const at::Tensor g = gradient.contiguous(), a = gate.contiguous(), b = up.contiguous();
  at::Tensor by_gate = empty_for(gate), by_up = empty_for(gate);
  with_type(gate.scalar_type(), [&]<typename T>(T*) {
    const auto* pg = static_cast<const T*>(g.const_data_ptr());
    const auto* pa = static_cast<const T*>(a.const_data_ptr());
    const auto* pb = static_cast<const T*>(b.const_data_ptr());
    auto* qa = static_cast<T*>(by_gate.mutable_data_ptr());
    auto* qb = static_cast<T*>(by_up.mutable_data_ptr());
    core::parallel_for(a.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      detail::swiglu_backward(pg + begin, pa + begin, pb + begin, qa + begin, qb + begin, end - begin);
    });
  });
  return {by_gate, by_up};
}

Pair backward_meta(const at::Tensor&, const at::Tensor& gate, const at::Tensor&) {
  return {empty_for(gate), empty_for(gate)};
}

Pair call_backward(const at::Tensor& gradient, const at::Tensor& gate, const at::Tensor& up) {
  static const auto op =
      find<Pair(const at::Tensor&, const at::Tensor&, const at::Tensor&)>("cohort::swiglu_backward");
  return op.call(gradient, gate, up);
}

/// The gradients of the two gradients, in LibTorch's operators: what differentiates twice is rare, and need
/// not be fast.
std::vector<at::Tensor> second_derivative(const Call& call, const std::vector<at::Tensor>& flowing) {
  const at::Tensor &g = call.tensor(0), &a = call.tensor(1), &b = call.tensor(2);
  const at::Tensor &u = flowing[0], &v = flowing[1];
  const at::Tensor s = at::sigmoid(a);
  // backward gives by_gate = g * b * silu'(a) and by_up = g * silu(a). With u and v flowing into them, these
  // are the derivatives of u * by_gate + v * by_up by g, a and b.
  const at::Tensor silu = a * s;
  const at::Tensor first = s * (1 + a * (1 - s));                 // of silu
  const at::Tensor second = s * (1 - s) * (2 + a * (1 - 2 * s));  // of silu, twice
  return {u * b * first + v * silu, g * (u * b * second + v * first), u * g * first};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cohort, library) {
  define(library, "swiglu(Tensor gate, Tensor up) -> Tensor")
      .cpu(&forward_cpu)
      .meta(&forward_meta)
      .autocast(Autocast::kWidest)
      .backward([](const Call& call, const std::vector<at::Tensor>& gradients) {
        const auto [by_gate, by_up] = call_backward(gradients[0], call.tensor(0), call.tensor(1));
        return std::vector<at::Tensor>{by_gate, by_up};
      });
  define(library, "swiglu_backward(Tensor gradient, Tensor gate, Tensor up) -> (Tensor, Tensor)")
      .cpu(&backward_cpu)
      .meta(&backward_meta)
      .backward(&second_derivative);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  static const auto op = find<at::Tensor(const at::Tensor&, const at::Tensor&)>("cohort::swiglu");
  return op.call(gate, up);
}

}  // namespace cohort::ops

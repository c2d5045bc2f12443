#include "cohort/ops/swiglu_kernel.h"

#include <bit>
#include <cmath>

#include "cohort/core/vector_clones.h"

namespace cohort::ops::detail {
namespace {

/// e^x to about 2 units in the last place, in operations that a compiler can do on a vector: x = n ln 2 + r,
/// a polynomial for e^r, and n added to the exponent. Clamped where float has no room.
inline __attribute__((always_inline)) float exp_of(float x) {
  x = x < -87.0F ? -87.0F : x;
  x = x > 88.0F ? 88.0F : x;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: what is added to it loses its fraction
  const float n = (x * 1.44269504088896341F + kRound) - kRound;
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;  // ln 2 in two parts, the first exact
  float p = 1.0F / 5040.0F;
  p = p * r + 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const auto exponent = static_cast<std::uint32_t>(static_cast<std::int32_t>(n) + 127) << 23;
  return p * std::bit_cast<float>(exponent);
}

inline double exp_of(double x) {
  return std::exp(x);
}

template <typename T>
inline __attribute__((always_inline)) T sigmoid_of(T x) {
  return T(1) / (T(1) + exp_of(-x));
}

inline __attribute__((always_inline)) float widen(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline __attribute__((always_inline)) std::uint16_t narrow(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  return static_cast<std::uint16_t>(value != value ? 0x7fc0U : rounded);
}

template <typename T>
inline __attribute__((always_inline)) void backward_at(T gradient, T gate, T up, T& gate_gradient,
                                                       T& up_gradient) {
  const T sigmoid = sigmoid_of(gate);
  up_gradient = gradient * (gate * sigmoid);
  gate_gradient = gradient * up * (sigmoid * (T(1) + gate * (T(1) - sigmoid)));
}

}  // namespace

COHORT_VECTOR_CLONES void swiglu_forward(const float* __restrict gate, const float* __restrict up,
                                         float* __restrict out, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) out[i] = gate[i] * sigmoid_of(gate[i]) * up[i];
}

void swiglu_forward(const double* gate, const double* up, double* out, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) out[i] = gate[i] * sigmoid_of(gate[i]) * up[i];
}

COHORT_VECTOR_CLONES void swiglu_forward(const std::uint16_t* __restrict gate,
                                         const std::uint16_t* __restrict up, std::uint16_t* __restrict out,
                                         std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float value = widen(gate[i]);
    out[i] = narrow(value * sigmoid_of(value) * widen(up[i]));
  }
}

COHORT_VECTOR_CLONES void swiglu_backward(const float* __restrict gradient, const float* __restrict gate,
                                          const float* __restrict up, float* __restrict gate_gradient,
                                          float* __restrict up_gradient, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    backward_at(gradient[i], gate[i], up[i], gate_gradient[i], up_gradient[i]);
  }
}

void swiglu_backward(const double* gradient, const double* gate, const double* up, double* gate_gradient,
                     double* up_gradient, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    backward_at(gradient[i], gate[i], up[i], gate_gradient[i], up_gradient[i]);
  }
}

COHORT_VECTOR_CLONES void swiglu_backward(const std::uint16_t* __restrict gradient,
                                          const std::uint16_t* __restrict gate,
                                          const std::uint16_t* __restrict up,
                                          std::uint16_t* __restrict gate_gradient,
                                          std::uint16_t* __restrict up_gradient, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    float by_gate = 0, by_up = 0;
    backward_at(widen(gradient[i]), widen(gate[i]), widen(up[i]), by_gate, by_up);
    gate_gradient[i] = narrow(by_gate);
    up_gradient[i] = narrow(by_up);
  }
}

}  // namespace cohort::ops::detail

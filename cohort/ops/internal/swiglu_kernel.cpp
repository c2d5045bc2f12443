// In float the exponential is a power of two times a polynomial, in operations that a compiler can do on
// vectors. The sigmoid is kept as two factors: where it has no room in its type, its product with the rest
// still may. What is not a number passes through the factor gate. bfloat16 is widened, computed in float and
// rounded once.
#include "cohort/ops/internal/swiglu_kernel.h"

#include <bit>
#include <cmath>

#include "cohort/core/vector_clones.h"

namespace cohort::ops::detail {
namespace {

/// The sigmoid as value * scale. Two factors, as the sigmoid of a very negative number has no room in a float
/// where its product with the rest has.
template <typename T>
struct Sigmoid {
  T value, scale;
};

/// 2^n for -127 < n < 128, and 0 for -127.
inline __attribute__((always_inline)) float power_of_two(std::int32_t n) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(n + 127) << 23);
}

/// From e^-x = e^r 2^n, with a polynomial for e^r to about 2 units in the last place: 1 / (1 + e^r 2^n), in
/// operations that a compiler can do on a vector. Of an n that has no room, the rest goes to the scale.
inline __attribute__((always_inline)) Sigmoid<float> sigmoid_of(float x) {
  constexpr std::int32_t kMax = 125;  // 1 / e^r 2^kMax has room
  float y = -x;
  y = y > -87.0F ? y : -87.0F;           // and what is not a number: only the factor x hands it on
  y = y < 174.7F ? y : 174.7F;           // n = kMax + 127
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: what is added to it loses its fraction
  const float n = (y * 1.44269504088896341F + kRound) - kRound;
  const float r = (y - n * 0.693359375F) + n * 2.12194440e-4F;  // ln 2 in two parts, the first exact
  float p = 1.0F / 5040.0F;
  p = p * r + 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const auto whole = static_cast<std::int32_t>(n);
  const std::int32_t near = whole < kMax ? whole : kMax;
  return {1.0F / (1.0F + p * power_of_two(near)), power_of_two(near - whole)};
}

/// From root = e^(-|x| / 2) <= 1, which cannot overflow, and e = root^2: 1 / (1 + e), or e / (1 + e).
inline Sigmoid<double> sigmoid_of(double x) {
  const double half = -0.5 * std::fabs(x);
  const bool has_room = half > -700;  // false for what is not a number
  const double root = std::exp(has_room ? half : -700);
  const double below = 1 + root * root;
  if (!(x < 0)) return {1 / below, 1};
  return {root / below, has_room ? root : 0};
}

template <typename T>
inline __attribute__((always_inline)) T forward_at(T gate, T up) {
  const Sigmoid<T> sigmoid = sigmoid_of(gate);
  return gate * sigmoid.value * up * sigmoid.scale;
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
  const Sigmoid<T> sigmoid = sigmoid_of(gate);
  const T rest = T(1) - sigmoid.value * sigmoid.scale;
  up_gradient = gradient * (gate * sigmoid.value) * sigmoid.scale;
  gate_gradient = gradient * up * (sigmoid.value * (T(1) + gate * rest)) * sigmoid.scale;
}

}  // namespace

COHORT_VECTOR_CLONES void swiglu_forward(const float* __restrict gate, const float* __restrict up,
                                         float* __restrict out, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) out[i] = forward_at(gate[i], up[i]);
}

void swiglu_forward(const double* gate, const double* up, double* out, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) out[i] = forward_at(gate[i], up[i]);
}

COHORT_VECTOR_CLONES void swiglu_forward(const std::uint16_t* __restrict gate,
                                         const std::uint16_t* __restrict up, std::uint16_t* __restrict out,
                                         std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    out[i] = narrow(forward_at(widen(gate[i]), widen(up[i])));
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

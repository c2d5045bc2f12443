#pragma once

#include <cstdint>

/// The loops of ops/swiglu.h over plain memory. `numel` values each, none shared between in and out.
namespace cohort::ops::detail {

/// out = silu(gate) * up.
void swiglu_forward(const float* gate, const float* up, float* out, std::int64_t numel);
void swiglu_forward(const double* gate, const double* up, double* out, std::int64_t numel);

/// The gradients of gate and up, from that of the output.
void swiglu_backward(const float* gradient, const float* gate, const float* up, float* gate_gradient,
                     float* up_gradient, std::int64_t numel);
void swiglu_backward(const double* gradient, const double* gate, const double* up, double* gate_gradient,
                     double* up_gradient, std::int64_t numel);

/// bfloat16 as its 16 bits; computed in float and rounded to the nearest, ties to even.
void swiglu_forward(const std::uint16_t* gate, const std::uint16_t* up, std::uint16_t* out,
                    std::int64_t numel);
void swiglu_backward(const std::uint16_t* gradient, const std::uint16_t* gate, const std::uint16_t* up,
                     std::uint16_t* gate_gradient, std::uint16_t* up_gradient, std::int64_t numel);

}  // namespace cohort::ops::detail

// CPU memory is read in blocks: the bits of all elements are joined, and a block without a full exponent is
// finite. Only a block whose joined bits have a full exponent is looked at element by element. On an
// accelerator the answer stays there as a tensor, so nobody waits for it; Note [Finite gradients] says why
// not by isfinite().
#include "cohort/optim/finite.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>

#include "cohort/core/parallel.h"

// Note [Finite gradients]
// On the CPU a pass of our own over the memory: a number is not finite where all bits of its exponent are
// set. LibTorch's isfinite().all() makes a tensor of flags for each gradient, and its norms take a call for
// each: with 60 small gradients that was more than the optimizer's step. On an accelerator the norm of
// largest absolute values, which knows NaN and cannot overflow (a sum of squares can), in one call for all
// gradients. Nobody waits for it.
namespace cohort::optim {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kBlock = 2048;       // elements of one look
constexpr std::int64_t kStretch = 1 << 18;  // elements; less is not worth a second thread

template <typename Bits, typename T>
[[gnu::always_inline]] inline bool scan(const T* values, std::int64_t count, Bits exponent) {
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t end = std::min(count, begin + kBlock);
    // Where some bit of the exponent is set nowhere in the block, as in gradients below 2, all are finite.
    Bits any = 0;
    for (std::int64_t i = begin; i < end; ++i) any |= std::bit_cast<Bits>(values[i]);
    if ((any & exponent) != exponent) continue;
    Bits found = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      found |= static_cast<Bits>((std::bit_cast<Bits>(values[i]) & exponent) == exponent);
    }
    if (found != 0) return true;
  }
  return false;
}

#if defined(__x86_64__)
template <typename Bits, typename T>
__attribute__((target("avx2"))) bool scan_avx2(const T* values, std::int64_t count, Bits exponent) {
  return scan(values, count, exponent);
}
#endif

template <typename T, typename Bits>
bool has_non_finite(const at::Tensor& dense, std::int64_t begin, std::int64_t end, Bits exponent) {
  const T* values = dense.const_data_ptr<T>() + begin;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return scan_avx2(values, end - begin, exponent);
#endif
  return scan(values, end - begin, exponent);
}

bool has_non_finite(const at::Tensor& dense, std::int64_t begin, std::int64_t end) {
  switch (dense.scalar_type()) {
    case at::kFloat:
      return has_non_finite<float, std::uint32_t>(dense, begin, end, 0x7f800000U);
    case at::kDouble:
      return has_non_finite<double, std::uint64_t>(dense, begin, end, 0x7ff0000000000000U);
    case at::kBFloat16:
      return has_non_finite<at::BFloat16, std::uint16_t>(dense, begin, end, 0x7f80U);
    default:
      return has_non_finite<at::Half, std::uint16_t>(dense, begin, end, 0x7c00U);
  }
}

bool has_own_pass(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense() &&
         (type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf);
}

bool on_cpu_non_finite(const at::Tensor& gradient) {
  if (!has_own_pass(gradient)) return !at::isfinite(gradient).all().item<bool>();
  if (gradient.numel() <= kStretch) return has_non_finite(gradient, 0, gradient.numel());
  std::atomic<bool> found{false};
  core::parallel_for(gradient.numel(), kStretch, [&](std::int64_t begin, std::int64_t end) {
    if (has_non_finite(gradient, begin, end)) found = true;
  });
  return found;
}

}  // namespace

bool NonFinite::any() const {
  return on_cpu || (on_device.defined() && on_device.item<float>() != 0);
}

void NonFinite::add(const NonFinite& other) {
  on_cpu = on_cpu || other.on_cpu;
  if (!other.on_device.defined()) return;
  on_device =
      on_device.defined() ? at::maximum(on_device, other.on_device.to(on_device.device())) : other.on_device;
}

NonFinite non_finite_scalar(const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  if (value.is_cpu()) return {.on_cpu = !std::isfinite(value.item<double>())};
  const at::Tensor plain = value.detach();
  return {.on_device =
              plain.sub(plain).ne(0).to(at::kFloat)};  // what is not finite differs from itself by NaN
}

NonFinite find_non_finite(const std::vector<ParamGroup>& groups) {
  const c10::NoGradGuard no_grad;
  NonFinite found;
  std::map<std::pair<c10::DeviceIndex, at::ScalarType>, std::vector<at::Tensor>> elsewhere;
  for (const ParamGroup& group : groups) {
    for (const at::Tensor& parameter : group.params) {
      at::Tensor gradient = parameter.grad();
      if (!gradient.defined() || gradient.numel() == 0 || gradient._is_zerotensor()) continue;
      if (gradient.is_sparse()) gradient = gradient._values();
      if (!gradient.is_cpu()) {
        elsewhere[{gradient.device().index(), gradient.scalar_type()}].push_back(gradient);
      } else if (!found.on_cpu) {
        found.on_cpu = on_cpu_non_finite(gradient);
      }
    }
  }
  for (const auto& [kind, gradients] : elsewhere) {
    const at::Tensor largest = at::stack(at::_foreach_norm(gradients, kInfinity));
    found.add(non_finite_scalar(at::linalg_vector_norm(largest, kInfinity)));
  }
  return found;
}

}  // namespace cohort::optim

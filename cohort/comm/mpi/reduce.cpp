#include "cohort/comm/mpi/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <array>
#include <type_traits>

namespace cohort::comm::mpi {
namespace {

const char* name_of(ReduceOp op) {
  constexpr std::array kNames = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
  return op < kNames.size() ? kNames[op] : "this operation";
}

template <typename T>
struct WideOf {
  using type = T;
};
template <>
struct WideOf<c10::Half> {
  using type = float;
};
template <>
struct WideOf<c10::BFloat16> {
  using type = float;
};
template <typename T>
  requires std::is_integral_v<T>
struct WideOf<T> {
  using type = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
};

// Whole numbers wrap around, which signed ones may not.
template <typename T>
T plus(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  } else {
    return a + b;
  }
}
template <typename T>
T times(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  } else {
    return a * b;
  }
}
// NaN stays, whichever rank has it.
template <typename T>
T smaller(T a, T b) {
  return b < a || b != b ? b : a;
}
template <typename T>
T larger(T a, T b) {
  return a < b || b != b ? b : a;
}

template <typename T, typename Combine>
void reduce_with(const Parts& parts, std::byte* out, Combine combine) {
  using Wide = typename WideOf<T>::type;
  constexpr std::int64_t kBlock = 1024;
  std::array<Wide, kBlock> sum;
  const T* const from = reinterpret_cast<const T*>(parts.data);
  T* const to = reinterpret_cast<T*>(out);
  for (std::int64_t begin = 0; begin < parts.numel; begin += kBlock) {
    const auto size = static_cast<std::size_t>(std::min(kBlock, parts.numel - begin));
    std::transform(from + begin, from + begin + size, sum.begin(), [](T x) { return static_cast<Wide>(x); });
    for (std::int64_t rank = 1; rank < parts.ranks; ++rank) {
      const T* const other = from + rank * parts.numel + begin;
      for (std::size_t i = 0; i < size; ++i) sum[i] = combine(sum[i], static_cast<Wide>(other[i]));
    }
    if (parts.op == c10d::ReduceOp::AVG) {
      for (std::size_t i = 0; i < size; ++i) sum[i] = sum[i] / static_cast<Wide>(parts.ranks);
    }
    std::transform(sum.begin(), sum.begin() + size, to + begin, [](Wide x) { return static_cast<T>(x); });
  }
}

template <typename T>
void reduce_as(const Parts& parts, std::byte* out) {
  using Wide = typename WideOf<T>::type;
  constexpr bool kOrdered = std::is_arithmetic_v<Wide>, kWhole = std::is_integral_v<T>;
  switch (parts.op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
      return reduce_with<T>(parts, out, &plus<Wide>);
    case c10d::ReduceOp::PRODUCT:
      return reduce_with<T>(parts, out, &times<Wide>);
    case c10d::ReduceOp::MIN:
      if constexpr (kOrdered) return reduce_with<T>(parts, out, &smaller<Wide>);
      break;
    case c10d::ReduceOp::MAX:
      if constexpr (kOrdered) return reduce_with<T>(parts, out, &larger<Wide>);
      break;
    case c10d::ReduceOp::BAND:
      if constexpr (kWhole) return reduce_with<T>(parts, out, [](Wide a, Wide b) { return a & b; });
      break;
    case c10d::ReduceOp::BOR:
      if constexpr (kWhole) return reduce_with<T>(parts, out, [](Wide a, Wide b) { return a | b; });
      break;
    case c10d::ReduceOp::BXOR:
      if constexpr (kWhole) return reduce_with<T>(parts, out, [](Wide a, Wide b) { return a ^ b; });
      break;
    default:
      break;
  }
  TORCH_CHECK(false, "Backend mpi does not support ", name_of(parts.op), " of ", parts.dtype);
}

// Truth values are the bytes 0 and 1.
void reduce_bools(Parts parts, std::byte* out) {
  switch (parts.op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::MAX:
      parts.op = c10d::ReduceOp::BOR;
      break;
    case c10d::ReduceOp::PRODUCT:
    case c10d::ReduceOp::MIN:
      parts.op = c10d::ReduceOp::BAND;
      break;
    case c10d::ReduceOp::AVG:
      TORCH_CHECK(false, "Backend mpi does not support AVG of Bool");
    default:
      break;
  }
  reduce_as<std::uint8_t>(parts, out);
}

}  // namespace

void check_reducible(at::ScalarType dtype, ReduceOp op) {
  reduce_parts({.dtype = dtype, .op = op}, nullptr);
}

void reduce_parts(const Parts& parts, std::byte* out) {
  switch (parts.dtype) {
    case at::kFloat:
      return reduce_as<float>(parts, out);
    case at::kDouble:
      return reduce_as<double>(parts, out);
    case at::kHalf:
      return reduce_as<c10::Half>(parts, out);
    case at::kBFloat16:
      return reduce_as<c10::BFloat16>(parts, out);
    case at::kComplexFloat:
      return reduce_as<c10::complex<float>>(parts, out);
    case at::kComplexDouble:
      return reduce_as<c10::complex<double>>(parts, out);
    case at::kChar:
      return reduce_as<std::int8_t>(parts, out);
    case at::kByte:
      return reduce_as<std::uint8_t>(parts, out);
    case at::kShort:
      return reduce_as<std::int16_t>(parts, out);
    case at::kUInt16:
      return reduce_as<std::uint16_t>(parts, out);
    case at::kInt:
      return reduce_as<std::int32_t>(parts, out);
    case at::kUInt32:
      return reduce_as<std::uint32_t>(parts, out);
    case at::kLong:
      return reduce_as<std::int64_t>(parts, out);
    case at::kUInt64:
      return reduce_as<std::uint64_t>(parts, out);
    case at::kBool:
      return reduce_bools(parts, out);
    default:
      TORCH_CHECK(false, "Backend mpi does not reduce ", parts.dtype);
  }
}

}  // namespace cohort::comm::mpi

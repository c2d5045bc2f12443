// The loops of kernels.h. Compiled once for each set of instructions, COHORT_KERNELS_ISA, with its flags. So
// nothing here may be shared with other sources: an inline function of the standard library that was
// compiled for AVX-512 could be the one that the linker keeps for all. Hence no standard header.
#include <stddef.h>
#include <stdint.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "cohort/comm/internal/kernels/kernels.h"

namespace cohort::comm::COHORT_KERNELS_ISA {
namespace {

// Arrays are the same, or do not touch.
#if defined(__clang__)
#define COHORT_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define COHORT_LOOP _Pragma("GCC ivdep")
#endif

constexpr size_t kBlock = 1024;  // numbers that are summed in the nearest cache

template <typename To, typename From>
To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// ------------------------------------------------------------------------------------------------ copying

#if defined(__AVX512F__)
constexpr size_t kVector = 64;
#elif defined(__AVX2__)
constexpr size_t kVector = 32;
#else
constexpr size_t kVector = 16;
#endif
typedef unsigned char Vector __attribute__((vector_size(kVector), aligned(1), may_alias));

void copy(void* to, const void* from, size_t bytes) {
  auto* out = static_cast<unsigned char*>(to);
  const auto* in = static_cast<const unsigned char*>(from);
  size_t i = 0;
  for (; i + 4 * kVector <= bytes; i += 4 * kVector) {
    const Vector a = *reinterpret_cast<const Vector*>(in + i);
    const Vector b = *reinterpret_cast<const Vector*>(in + i + kVector);
    const Vector c = *reinterpret_cast<const Vector*>(in + i + 2 * kVector);
    const Vector d = *reinterpret_cast<const Vector*>(in + i + 3 * kVector);
    *reinterpret_cast<Vector*>(out + i) = a;
    *reinterpret_cast<Vector*>(out + i + kVector) = b;
    *reinterpret_cast<Vector*>(out + i + 2 * kVector) = c;
    *reinterpret_cast<Vector*>(out + i + 3 * kVector) = d;
  }
  __builtin_memcpy(out + i, in + i, bytes - i);
}

// Past the cache where the processor can; by copy() where it cannot.
void copy_past_cache(void* to, const void* from, size_t bytes) {
#if defined(__SSE2__)
  auto* out = static_cast<unsigned char*>(to);
  const auto* in = static_cast<const unsigned char*>(from);
  const size_t before = (kVector - reinterpret_cast<uintptr_t>(to) % kVector) % kVector;
  size_t i = before < bytes ? before : bytes;
  __builtin_memcpy(out, in, i);
  for (; i + kVector <= bytes; i += kVector) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_loadu_si512(in + i));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i)));
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
#endif
  }
  __builtin_memcpy(out + i, in + i, bytes - i);
#else
  copy(to, from, bytes);
#endif
}

// What went past the cache is seen by others before what is written next.
void fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// ---------------------------------------------------------------------------------------------- operations


// Whole numbers wrap, as LibTorch's do; in a type of their own sign that would be undefined.
template <size_t bytes>
struct Wrapping {
  using Type = uint32_t;
};
template <>
struct Wrapping<8> {
  using Type = uint64_t;
};
template <typename T>
constexpr bool kIsWhole = static_cast<T>(0.5F) == static_cast<T>(0);

template <typename T>
struct Complex {
  T real;
  T imag;
};
template <typename T>
constexpr bool kIsWhole<Complex<T>> = false;
// GCC 12 multiplies, adds and subtracts in alternating lanes in one step, -ffp-contract=off or not, but not
// past this barrier.
template <typename T>
T round_product(T product) {
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(product);
#else
  return product;
#endif
}
template <typename T>
Complex<T> operator*(Complex<T> a, Complex<T> b) {
  return {round_product(a.real * b.real) - round_product(a.imag * b.imag),
          round_product(a.real * b.imag) + round_product(a.imag * b.real)};
}

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (kIsWhole<T>) {
      using Type = typename Wrapping<sizeof(T)>::Type;
      return static_cast<T>(static_cast<Type>(a) + static_cast<Type>(b));
    } else {
      return a + b;
    }
  }
};
struct Average : Sum {};
struct Product {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (kIsWhole<T>) {
      using Type = typename Wrapping<sizeof(T)>::Type;
      return static_cast<T>(static_cast<Type>(a) * static_cast<Type>(b));
    } else {
      return a * b;
    }
  }
};
// What is not a number stays, as in LibTorch's minimum and maximum.
struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return b < a || b != b ? b : a;
  }
};
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return b > a || b != b ? b : a;
  }
};
struct And {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <typename Op>
constexpr bool kAverages = false;
template <>
constexpr bool kAverages<Average> = true;

// ------------------------------------------------------------------------------------------------- formats

// Numbers that are summed as they are stored.
template <typename T>
struct Native {
  using Stored = T;
  using Summed = T;
  static constexpr bool kConverts = false;
  static void load(T* to, const T* from, size_t n) { copy(to, from, n * sizeof(T)); }
};

// Whole numbers that are averaged: their sum needs more bits than they have.
template <typename T>
struct Widened {
  using Stored = T;
  using Summed = int64_t;
  static constexpr bool kConverts = true;
  static void load(int64_t* to, const T* from, size_t n) {
    COHORT_LOOP
    for (size_t i = 0; i < n; ++i) to[i] = from[i];
  }
  static void store(T* to, const int64_t* from, size_t n) {
    COHORT_LOOP
    for (size_t i = 0; i < n; ++i) to[i] = static_cast<T>(from[i]);
  }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Summed = float;
  static constexpr bool kConverts = true;
  static void load(float* to, const uint16_t* from, size_t n) {
    COHORT_LOOP
    for (size_t i = 0; i < n; ++i) to[i] = bits_of<float>(static_cast<uint32_t>(from[i]) << 16);
  }
  // To the nearest, halves to even.
  static void store(uint16_t* to, const float* from, size_t n) {
    COHORT_LOOP
    for (size_t i = 0; i < n; ++i) {
      const auto bits = bits_of<uint32_t>(from[i]);
      const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
      to[i] = static_cast<uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? 0x7fc0U : rounded);
    }
  }
};

struct Half {
  using Stored = uint16_t;
  using Summed = float;
  static constexpr bool kConverts = true;
  static void load(float* to, const uint16_t* from, size_t n) {
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    }
#endif
    for (; i < n; ++i) {
      const uint32_t rest = from[i] & 0x7fffU, sign = (from[i] & 0x8000U) << 16;
      // Moving the bits leaves the exponent 112 short, and this holds for the smallest ones too.
      const float moved = bits_of<float>(rest << 13) * 0x1p112F;
      const uint32_t bits = rest >= 0x7c00U ? 0x7f800000U | (rest << 13) : bits_of<uint32_t>(moved);
      to[i] = bits_of<float>(sign | bits);
    }
  }
  static void store(uint16_t* to, const float* from, size_t n) {
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < n; ++i) {
      const auto bits = bits_of<uint32_t>(from[i]);
      const uint32_t sign = (bits >> 16) & 0x8000U, rest = bits & 0x7fffffffU;
      // Adding 0.5 leaves the multiples of 2^-24 that a small half is made of in the last bits, rounded.
      const uint32_t small = bits_of<uint32_t>(bits_of<float>(rest) + 0.5F) - 0x3f000000U;
      const uint32_t normal = (rest - 0x38000000U + 0xfffU + ((rest >> 13) & 1U)) >> 13;
      const uint32_t large = rest > 0x7f800000U ? 0x7e00U : 0x7c00U;
      to[i] = static_cast<uint16_t>(sign | (rest >= 0x47800000U  ? large
                                            : rest < 0x38800000U ? small
                                                                 : normal));
    }
  }
};

// ------------------------------------------------------------------------------------------------ reducing

template <typename Op, typename T>
void combine(T* to, const T* a, const T* b, size_t n) {
  COHORT_LOOP
  for (size_t i = 0; i < n; ++i) to[i] = Op::template apply<T>(a[i], b[i]);
}

template <typename Format, typename Op>
void sum_block(typename Format::Summed* sum, const void* const* from, int num_from, size_t start, size_t n) {
  using Stored = typename Format::Stored;
  const auto at = [&](int i) { return static_cast<const Stored*>(from[i]) + start; };
  if constexpr (Format::kConverts) {
    Format::load(sum, at(0), n);
    alignas(64) typename Format::Summed next[kBlock];
    for (int i = 1; i < num_from; ++i) {
      Format::load(next, at(i), n);
      combine<Op>(sum, sum, next, n);
    }
  } else {
    if (num_from == 1) {
      Format::load(sum, at(0), n);
    } else {
      combine<Op>(sum, at(0), at(1), n);
    }
    for (int i = 2; i < num_from; ++i) combine<Op>(sum, sum, at(i), n);
  }
  if constexpr (kAverages<Op>) {
    const auto count = static_cast<typename Format::Summed>(num_from);
    COHORT_LOOP
    for (size_t i = 0; i < n; ++i) sum[i] = static_cast<typename Format::Summed>(sum[i] / count);
  }
}

template <typename Format, typename Op>
void reduce(void* const* to, int num_to, const void* const* from, int num_from, size_t numel, bool stream) {
  using Stored = typename Format::Stored;
  if constexpr (!Format::kConverts && !kAverages<Op>) {
    if (num_from == 2 && num_to == 1 && !stream) {
      combine<Op>(static_cast<Stored*>(to[0]), static_cast<const Stored*>(from[0]),
                  static_cast<const Stored*>(from[1]), numel);
      return;
    }
  }
  alignas(64) typename Format::Summed sum[kBlock];
  for (size_t start = 0; start < numel; start += kBlock) {
    const size_t n = numel - start < kBlock ? numel - start : kBlock;
    sum_block<Format, Op>(sum, from, num_from, start, n);
    const void* result = sum;
    alignas(64) Stored stored[Format::kConverts ? kBlock : 1];
    if constexpr (Format::kConverts) {
      Format::store(stored, sum, n);
      result = stored;
    }
    for (int i = 0; i < num_to; ++i) {
      void* const out = static_cast<Stored*>(to[i]) + start;
      if (stream) {
        copy_past_cache(out, result, n * sizeof(Stored));
      } else {
        copy(out, result, n * sizeof(Stored));
      }
    }
  }
  if (stream) fence();
}

#define COHORT_ORDERED(Format, Averaged)                                                               \
  &reduce<Format, Sum>, &reduce<Averaged, Average>, &reduce<Format, Product>, &reduce<Format, Min>,    \
      &reduce<Format, Max>
#define COHORT_FLOATS(Format) \
  { COHORT_ORDERED(Format, Format), nullptr, nullptr, nullptr }
#define COHORT_WHOLE(T, Averaged)                                                                      \
  {                                                                                                    \
    COHORT_ORDERED(Native<T>, Averaged<T>), &reduce<Native<T>, And>, &reduce<Native<T>, Or>,           \
        &reduce<Native<T>, Xor>                                                                        \
  }
#define COHORT_COMPLEX(T) \
  { nullptr, nullptr, &reduce<Native<Complex<T>>, Product>, nullptr, nullptr, nullptr, nullptr, nullptr }

}  // namespace

#define COHORT_TEXT_OF(name) #name
#define COHORT_TEXT(name) COHORT_TEXT_OF(name)

extern const Kernels table;
const Kernels table = {
    COHORT_TEXT(COHORT_KERNELS_ISA),
    {COHORT_FLOATS(Native<float>), COHORT_FLOATS(Native<double>), COHORT_FLOATS(Half),
     COHORT_FLOATS(BFloat16), COHORT_WHOLE(int8_t, Widened), COHORT_WHOLE(uint8_t, Widened),
     COHORT_WHOLE(int16_t, Widened), COHORT_WHOLE(uint16_t, Widened), COHORT_WHOLE(int32_t, Widened),
     COHORT_WHOLE(uint32_t, Widened), COHORT_WHOLE(int64_t, Native), COHORT_WHOLE(uint64_t, Native),
     // Truth values: a sum and a maximum are true where one is, a product and a minimum where all are.
     {&reduce<Native<uint8_t>, Or>, nullptr, &reduce<Native<uint8_t>, And>, &reduce<Native<uint8_t>, And>,
      &reduce<Native<uint8_t>, Or>, &reduce<Native<uint8_t>, And>, &reduce<Native<uint8_t>, Or>,
      &reduce<Native<uint8_t>, Xor>},
     COHORT_COMPLEX(float),
     COHORT_COMPLEX(double),
     {}},
    &copy};

}  // namespace cohort::comm::COHORT_KERNELS_ISA

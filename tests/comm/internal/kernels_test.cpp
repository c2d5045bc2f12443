#include "cohort/comm/internal/kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

template <typename T>
std::vector<T> numbers(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> list(n);
  for (T& number : list) number = static_cast<T>(static_cast<int>(random() % 200) - 100);
  return list;
}

template <typename T>
T expected(Op op, T a, T b, T c) {
  switch (op) {
    case Op::kSum:
      return static_cast<T>(static_cast<T>(a + b) + c);
    case Op::kAvg:
      if constexpr (std::is_integral_v<T> && sizeof(T) < sizeof(std::int64_t)) {
        return static_cast<T>((std::int64_t{a} + b + c) / 3);
      }
      return static_cast<T>(static_cast<T>(static_cast<T>(a + b) + c) / static_cast<T>(3));
    case Op::kProduct:
      if constexpr (std::is_integral_v<T>) {  // small ones would become int, which may overflow
        return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b) *
                              static_cast<std::uint64_t>(c));
      }
      return static_cast<T>(static_cast<T>(a * b) * c);
    case Op::kMin:
      return std::min({a, b, c});
    case Op::kMax:
      return std::max({a, b, c});
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == Op::kAnd) return static_cast<T>(a & b & c);
    if (op == Op::kOr) return static_cast<T>(a | b | c);
    if (op == Op::kXor) return static_cast<T>(a ^ b ^ c);
  }
  return T{};
}

template <typename T>
void expect_reduces(const Kernels& kernels, Dtype dtype) {
  for (int op = 0; op < kOps; ++op) {
    const Reduce reduce = kernels.reduce[static_cast<int>(dtype)][op];
    if (reduce == nullptr) {
      EXPECT_TRUE(std::is_floating_point_v<T> && op >= static_cast<int>(Op::kAnd))
          << name_of(static_cast<Op>(op));
      continue;
    }
    for (const std::size_t n :
         {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{1025}, std::size_t{5000}}) {
      for (const bool stream : {false, true}) {
        // One byte off the alignment that T asks for is not legal; one T is what a view may have.
        std::vector<T> a = numbers<T>(n + 1, 1), b = numbers<T>(n + 1, 2), c = numbers<T>(n + 1, 3),
                       second(n + 1);
        std::vector<T> want(n);
        for (std::size_t i = 0; i < n; ++i)
          want[i] = expected<T>(static_cast<Op>(op), a[i + 1], b[i + 1], c[i + 1]);
        const void* from[] = {a.data() + 1, b.data() + 1, c.data() + 1};
        void* to[] = {b.data() + 1, second.data() + 1};  // the first is one that is read
        reduce(to, 2, from, 3, n, stream);
        for (std::size_t i = 0; i < n; ++i) {
          ASSERT_EQ(b[i + 1], want[i])
              << kernels.name << " " << name_of(dtype) << " " << name_of(static_cast<Op>(op)) << " " << i;
          ASSERT_EQ(second[i + 1], want[i]);
        }
        ASSERT_EQ(b[0], numbers<T>(n + 1, 2)[0]) << "before the first number something was written";
      }
    }
  }
}

TEST(KernelsTest, EverySetOfInstructionsReducesEveryTypeAlike) {
  int sets = 0;
  for (const Kernels* const* set = all_kernels(); *set != nullptr; ++set, ++sets) {
    expect_reduces<float>(**set, Dtype::kFloat);
    expect_reduces<double>(**set, Dtype::kDouble);
    expect_reduces<std::int8_t>(**set, Dtype::kInt8);
    expect_reduces<std::uint8_t>(**set, Dtype::kUint8);
    expect_reduces<std::int16_t>(**set, Dtype::kInt16);
    expect_reduces<std::uint16_t>(**set, Dtype::kUint16);
    expect_reduces<std::int32_t>(**set, Dtype::kInt32);
    expect_reduces<std::uint32_t>(**set, Dtype::kUint32);
    expect_reduces<std::int64_t>(**set, Dtype::kInt64);
    expect_reduces<std::uint64_t>(**set, Dtype::kUint64);
  }
  EXPECT_GE(sets, 1);
}

template <typename T>
void expect_average(const Kernels& kernels, Dtype dtype, std::vector<T> parts, T expected) {
  std::vector<std::vector<T>> lists;
  std::vector<const void*> from;
  for (const T part : parts) lists.emplace_back(40, part);
  for (const auto& list : lists) from.push_back(list.data());
  std::vector<T> out(40);
  void* to[] = {out.data()};
  kernels.reduce[static_cast<int>(dtype)][static_cast<int>(Op::kAvg)](
      to, 1, from.data(), static_cast<int>(from.size()), out.size(), false);
  EXPECT_EQ(out, std::vector<T>(40, expected)) << kernels.name << " " << name_of(dtype);
}

TEST(KernelsTest, AveragesOfWholeNumbersAreSummedIn64BitsAndRoundedTowardsZero) {
  for (const Kernels* const* set = all_kernels(); *set != nullptr; ++set) {
    expect_average<std::int8_t>(**set, Dtype::kInt8, {127, 127, 126}, 126);
    expect_average<std::int8_t>(**set, Dtype::kInt8, {-128, -128, -127}, -127);
    expect_average<std::uint8_t>(**set, Dtype::kUint8, std::vector<std::uint8_t>(300, 255), 255);
    expect_average<std::int16_t>(**set, Dtype::kInt16, {32767, 32767}, 32767);
    expect_average<std::uint16_t>(**set, Dtype::kUint16, {65535, 65534}, 65534);
    expect_average<std::int32_t>(**set, Dtype::kInt32, {2147483647, 2147483647, 2147483646}, 2147483646);
    expect_average<std::int32_t>(**set, Dtype::kInt32, {-2147483647 - 1, -2147483647}, -2147483647);
    expect_average<std::uint32_t>(**set, Dtype::kUint32, {4294967295U, 4294967295U, 1}, 2863311530U);
    expect_average<std::int64_t>(**set, Dtype::kInt64, {-3, 0}, -1);
    expect_average<std::uint64_t>(**set, Dtype::kUint64, {1ULL << 63, 1}, 1ULL << 62);
  }
}

TEST(KernelsTest, ComplexNumbersAreMultipliedWithTheSameBitsByEverySetOfInstructions) {
  constexpr std::size_t kNumbers = 1003;
  std::vector<float> a(2 * kNumbers), b(2 * kNumbers), want(2 * kNumbers);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = std::sin(static_cast<float>(i));
    b[i] = std::cos(3 * static_cast<float>(i));
  }
  for (std::size_t i = 0; i < a.size(); i += 2) {
    // Each product is rounded by itself.
    const volatile float rr = a[i] * b[i], ii = a[i + 1] * b[i + 1], ri = a[i] * b[i + 1],
                         ir = a[i + 1] * b[i];
    want[i] = rr - ii;
    want[i + 1] = ri + ir;
  }
  const std::vector<double> turn = {0, 1};
  for (const Kernels* const* set = all_kernels(); *set != nullptr; ++set) {
    const auto product = [&](Dtype dtype) {
      return (*set)->reduce[static_cast<int>(dtype)][static_cast<int>(Op::kProduct)];
    };
    std::vector<float> out(a.size());
    const void* from[] = {a.data(), b.data()};
    void* to[] = {out.data()};
    product(Dtype::kComplexFloat)(to, 1, from, 2, kNumbers, false);
    EXPECT_EQ(out, want) << (*set)->name;
    std::vector<double> result(2);
    const void* turns[] = {turn.data(), turn.data(), turn.data()};
    void* turned[] = {result.data()};
    product(Dtype::kComplexDouble)(turned, 1, turns, 3, 1, false);
    EXPECT_EQ(result, (std::vector<double>{0, -1})) << (*set)->name;
    EXPECT_EQ((*set)->reduce[static_cast<int>(Dtype::kComplexFloat)][static_cast<int>(Op::kMax)], nullptr);
  }
}

TEST(KernelsTest, WhatMeansNothingIsRejectedByName) {
  EXPECT_TRUE(can_reduce(Dtype::kFloat, Op::kMax));
  EXPECT_EQ(reducer(Dtype::kFloat, Op::kMax),
            kernels().reduce[static_cast<int>(Dtype::kFloat)][static_cast<int>(Op::kMax)]);
  EXPECT_FALSE(can_reduce(Dtype::kBytes, Op::kSum));
  COHORT_EXPECT_THROW_WITH(reducer(Dtype::kBool, Op::kAvg), UsageError, "AVG of bool means nothing");
}

float from_half(std::uint16_t half) {
  const int sign = half >> 15, exponent = half >> 10 & 31, fraction = half & 1023;
  float value = 0;
  if (exponent == 31) {
    value = fraction == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    value = std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  }
  return sign == 1 ? -value : value;
}

// The half nearest to a number, halves to even, by looking at all of them.
std::uint16_t nearest_half(float value) {
  std::uint16_t best = 0;
  double distance = 1e30;
  for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const double off =
        std::abs(static_cast<double>(from_half(static_cast<std::uint16_t>(bits))) - std::abs(value));
    if (off < distance || (off == distance && bits % 2 == 0)) {
      best = static_cast<std::uint16_t>(bits);
      distance = off;
    }
  }
  if (std::abs(value) >= 65520) best = 0x7c00;
  return static_cast<std::uint16_t>(best | (value < 0 ? 0x8000 : 0));
}

TEST(KernelsTest, HalvesAreSummedAsFloatAndRoundedOnce) {
  // Every half comes through unchanged, alone; and sums of three are rounded once.
  std::vector<std::uint16_t> all(65536);
  std::iota(all.begin(), all.end(), 0);
  for (const Kernels* const* set = all_kernels(); *set != nullptr; ++set) {
    std::vector<std::uint16_t> out(all.size());
    const void* from[] = {all.data()};
    void* to[] = {out.data()};
    (*set)->reduce[static_cast<int>(Dtype::kHalf)][static_cast<int>(Op::kSum)](to, 1, from, 1, all.size(),
                                                                               false);
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (std::isnan(from_half(all[i]))) {
        ASSERT_TRUE(std::isnan(from_half(out[i]))) << i;
      } else {
        ASSERT_EQ(out[i], all[i]) << (*set)->name;
      }
    }
    // 2048 + 1 is not a half, 2048 + 1 + 1 is; the smallest ones; one that becomes infinite; one between.
    const std::vector<std::vector<float>> sums = {
        {2048, 1, 1},   {1, 1e-3F, 1e-3F},  {6e-8F, 6e-8F, 6e-8F},     {65504, 15, 0},
        {65504, 16, 0}, {0.1F, 0.2F, 0.3F}, {-3e-5F, -3.1e-5F, 1e-6F}, {-65504, -65504, 1}};
    for (const auto& sum : sums) {
      // Ten times over: by eights, and the rest one by one.
      std::vector<std::vector<std::uint16_t>> parts;
      float total = 0;
      for (const float part : sum) {
        parts.emplace_back(11, nearest_half(part));
        total += from_half(parts.back()[0]);
      }
      const void* sources[] = {parts[0].data(), parts[1].data(), parts[2].data()};
      std::vector<std::uint16_t> result(11);
      void* target[] = {result.data()};
      (*set)->reduce[static_cast<int>(Dtype::kHalf)][static_cast<int>(Op::kSum)](target, 1, sources, 3, 11,
                                                                                 false);
      for (const std::uint16_t got : result)
        EXPECT_EQ(got, nearest_half(total)) << (*set)->name << " " << total;
    }
  }
}

TEST(KernelsTest, BFloat16IsSummedAsFloatAndRoundedToEven) {
  const auto shorten = [](float value) {
    return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  };
  for (const Kernels* const* set = all_kernels(); *set != nullptr; ++set) {
    const auto sum = [&](float a, float b, float c) {
      const std::uint16_t parts[] = {shorten(a), shorten(b), shorten(c)};
      const void* from[] = {&parts[0], &parts[1], &parts[2]};
      std::uint16_t out = 0;
      void* to[] = {&out};
      (*set)->reduce[static_cast<int>(Dtype::kBFloat16)][static_cast<int>(Op::kSum)](to, 1, from, 3, 1,
                                                                                     false);
      return std::bit_cast<float>(static_cast<std::uint32_t>(out) << 16);
    };
    EXPECT_EQ(sum(256, 1, 1), 258);  // 257 is none, so rounding twice would give 256
    EXPECT_EQ(sum(256, 1, 0), 256);  // half way: to even
    EXPECT_EQ(sum(258, 1, 0), 260);  // half way: to even
    EXPECT_TRUE(std::isnan(sum(1, std::numeric_limits<float>::quiet_NaN(), 1)));
  }
}

TEST(KernelsTest, WhatIsNotANumberStaysInMinimumAndMaximum) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Kernels* const* set = all_kernels(); *set != nullptr; ++set) {
    for (const Op op : {Op::kMin, Op::kMax}) {
      std::vector<float> a(40, 1), b(40, 2), out(40);
      a[3] = nan;
      b[33] = nan;
      const void* from[] = {a.data(), b.data()};
      void* to[] = {out.data()};
      (*set)->reduce[0][static_cast<int>(op)](to, 1, from, 2, 40, false);
      EXPECT_TRUE(std::isnan(out[3]) && std::isnan(out[33])) << (*set)->name;
      EXPECT_EQ(out[0], op == Op::kMin ? 1 : 2);
    }
  }
}

}  // namespace
}  // namespace cohort::comm

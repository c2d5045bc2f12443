#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace cohort::train {

/// A sum of doubles without rounding: value() depends on what was added, and not on the order. It has no
/// overflow on the way.
///
///     ExactSum sum;
///     for (double value : values) sum.add(value);
///     sum.value();                                   // rounded once
///
/// Takes about 600 bytes. Threads: one caller at a time.
/// Source: Neal, "Fast Exact Summation Using Small and Large Superaccumulators", arXiv:1505.05571, 2015.
class ExactSum {
 public:
  ExactSum() = default;
  /// Of these: what parts() gave.
  explicit ExactSum(const std::vector<double>& parts);

  void add(double value);
  void add(const ExactSum& other);

  /// Returns the sum, rounded to the nearest double, a tie to the even one; infinity where it is beyond the
  /// largest. Infinities and NaN that were added count as in any sum.
  double value() const;
  /// Returns doubles whose sum is the sum without rounding, the first is value(). Equal sums have equal
  /// parts.
  std::vector<double> parts() const;

 private:
  void carry();

  // The number sum(digits_[i] * 2^(32 i - kFraction)). Digits have signs, and room for many additions.
  static constexpr int kFraction = 1074;  // the exponent of the smallest double
  static constexpr std::size_t kDigits = (kFraction + 1024) / 32 + 3;
  std::array<std::int64_t, kDigits> digits_{};
  std::int64_t left_ = kMaxAdditions;  // additions before the next carry
  double special_ = 0;                 // the sum of what was added that is not finite
  static constexpr std::int64_t kMaxAdditions = std::int64_t{1} << 29;
};

}  // namespace cohort::train

// A fixed-point number that is as wide as all doubles together, in digits of 32 bits that have a sign and 31
// bits of room. An addition changes three digits; carries are made once in 2^29 additions, and before
// reading. To read, digits become those of the absolute value, and the 53 highest bits are rounded by the
// rest.
#include "cohort/train/exact_sum.h"

#include <bit>
#include <cmath>

namespace cohort::train {
namespace {

constexpr std::uint64_t kDigitMask = 0xffffffff;
constexpr int kMantissaBits = 53;

}  // namespace

ExactSum::ExactSum(const std::vector<double>& parts) {
  for (const double part : parts) add(part);
}

void ExactSum::add(double value) {
  if (!std::isfinite(value)) {
    special_ += value;
    return;
  }
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const auto biased = static_cast<int>(bits >> 52 & 0x7ff);
  std::uint64_t mantissa = bits & ((std::uint64_t{1} << 52) - 1);
  if (biased != 0) mantissa |= std::uint64_t{1} << 52;
  const int position = biased == 0 ? 0 : biased - 1;  // of the lowest bit of the mantissa
  const auto digit = static_cast<std::size_t>(position / 32);
  const int shift = position % 32;
  const std::uint64_t low = (mantissa & kDigitMask) << shift, high = (mantissa >> 32) << shift;
  const std::int64_t sign = bits >> 63 != 0 ? -1 : 1;
  digits_[digit] += sign * static_cast<std::int64_t>(low & kDigitMask);
  digits_[digit + 1] += sign * static_cast<std::int64_t>((low >> 32) + (high & kDigitMask));
  digits_[digit + 2] += sign * static_cast<std::int64_t>(high >> 32);
  if (--left_ == 0) carry();
}

void ExactSum::add(const ExactSum& other) {
  ExactSum carried = other;
  carried.carry();
  for (std::size_t i = 0; i < kDigits; ++i) digits_[i] += carried.digits_[i];
  special_ += other.special_;
  if (--left_ == 0) carry();
}

// Digits are 0 to 2^32 - 1 afterwards; the highest one has the sign.
void ExactSum::carry() {
  for (std::size_t i = 0; i + 1 < kDigits; ++i) {
    const std::int64_t over = digits_[i] >> 32;  // rounded down
    digits_[i] -= over * (std::int64_t{1} << 32);
    digits_[i + 1] += over;
  }
  left_ = kMaxAdditions;
}

double ExactSum::value() const {
  if (special_ != 0) return special_;  // infinity, or NaN, which is not 0 either
  ExactSum sum = *this;
  sum.carry();
  const bool is_negative = sum.digits_.back() < 0;
  if (is_negative) {
    for (std::int64_t& digit : sum.digits_) digit = -digit;
    sum.carry();
  }
  std::size_t top = kDigits;
  while (top > 0 && sum.digits_[top - 1] == 0) --top;
  if (top == 0) return 0;
  const auto width = [](std::int64_t digit) { return std::bit_width(static_cast<std::uint64_t>(digit)); };
  const std::int64_t num_bits = static_cast<std::int64_t>(top - 1) * 32 + width(sum.digits_[top - 1]);
  // The lowest bit that the result has. What is below it decides how it is rounded.
  const std::int64_t lowest = num_bits > kMantissaBits ? num_bits - kMantissaBits : 0;
  const auto bit = [&](std::int64_t place) {
    return static_cast<std::uint64_t>(sum.digits_[static_cast<std::size_t>(place / 32)]) >> (place % 32) & 1;
  };
  std::uint64_t mantissa = 0;
  for (std::int64_t place = num_bits - 1; place >= lowest; --place) mantissa = mantissa << 1 | bit(place);
  if (lowest > 0 && bit(lowest - 1) != 0) {
    bool is_tie = true;
    for (std::int64_t place = lowest - 2; place >= 0 && is_tie; --place) is_tie = bit(place) == 0;
    if (!is_tie || (mantissa & 1) != 0) ++mantissa;
  }
  const double magnitude = std::ldexp(static_cast<double>(mantissa), static_cast<int>(lowest) - kFraction);
  return is_negative ? -magnitude : magnitude;
}

std::vector<double> ExactSum::parts() const {
  std::vector<double> parts = {value()};
  if (!std::isfinite(parts[0])) return parts;
  ExactSum rest = *this;
  for (;;) {
    rest.add(-parts.back());
    const double next = rest.value();
    if (next == 0) return parts;
    parts.push_back(next);
  }
}

}  // namespace cohort::train

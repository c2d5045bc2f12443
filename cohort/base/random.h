#pragma once

#include <array>
#include <cmath>
#include <cstdint>

/// Counter-based random streams: a stream is a pure function of (seed, epoch, position, purpose).
///
/// The same numbers come out whatever thread, worker or rank asks, so input does not depend on how it was
/// parallelised and a run can stop anywhere.
/// Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011 (Philox4x32-10).
namespace cohort::base {

/// What a stream is used for; streams of different purposes are independent.
enum class Purpose : std::uint32_t {
  kTransform = 1,
  kGenerator = 2,
  kSynthetic = 3,
  kPart = 4,
  kUser = 1000
};

/// One Philox4x32-10 block.
inline std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                           std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = 0xD2511F53ull * counter[0];
    const std::uint64_t b = 0xCD9E8D57ull * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

/// A stream of random numbers. Cheap to make (no state but a counter), so make one per sample.
/// Threads: one caller at a time.
class RandomStream {
 public:
  /// `epoch` uses its lower 32 bits.
  RandomStream(std::uint64_t seed, std::uint64_t epoch, std::uint64_t position, Purpose purpose)
      : key_{static_cast<std::uint32_t>(seed),
             static_cast<std::uint32_t>(seed >> 32) ^ (static_cast<std::uint32_t>(purpose) * 0x85EBCA6Bu)},
        counter_{0, static_cast<std::uint32_t>(epoch), static_cast<std::uint32_t>(position),
                 static_cast<std::uint32_t>(position >> 32)} {}

  /// Returns 32 random bits and moves the stream on by one number.
  std::uint32_t next_u32() {
    if (used_ == 4) {
      block_ = philox(counter_, key_);
      ++counter_[0];
      used_ = 0;
    }
    return block_[used_++];
  }

  /// Returns 64 random bits: two of next_u32(), the low half first.
  std::uint64_t next_u64() {
    const std::uint64_t low = next_u32();
    return (static_cast<std::uint64_t>(next_u32()) << 32) | low;
  }

  /// Uniform in [0, 1), with 53 random bits.
  double uniform() { return static_cast<double>(next_u64() >> 11) * 0x1.0p-53; }
  /// Uniform in [low, high).
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  /// Uniform over low, low + 1, ..., high - 1; `high` must be above `low`.
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    // Unsigned, so that a range of more than half of all numbers does not overflow.
    const auto first = static_cast<std::uint64_t>(low);
    const std::uint64_t range = static_cast<std::uint64_t>(high) - first;
    return static_cast<std::int64_t>(
        first + static_cast<std::uint64_t>((static_cast<unsigned __int128>(next_u64()) * range) >> 64));
  }
  /// True with probability `p`.
  bool bernoulli(double p) { return uniform() < p; }
  /// Standard normal (Box and Muller, the cosine branch).
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log1p(-uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }

 private:
  std::array<std::uint32_t, 2> key_;
  std::array<std::uint32_t, 4> counter_;
  std::array<std::uint32_t, 4> block_{};
  int used_ = 4;
};

/// Returns a seed for LibTorch's generator at (seed, step, rank).
inline std::uint64_t generator_seed(std::uint64_t seed, std::uint64_t step, std::uint64_t rank) {
  return RandomStream(seed, rank, step, Purpose::kGenerator).next_u64() >> 1;
}

}  // namespace cohort::base

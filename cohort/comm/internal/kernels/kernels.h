#pragma once

#include <cstddef>
#include <cstdint>

/// Loops over memory, in the widest form that this processor has: what backends of our own sum and copy with.
namespace cohort::comm {

enum class Dtype : std::uint8_t {
  kFloat,
  kDouble,
  kHalf,      ///< summed as float
  kBFloat16,  ///< summed as float
  kInt8,
  kUint8,
  kInt16,
  kUint16,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kBool,
  kComplexFloat,   ///< only multiplied; sums and averages are those of twice as many floats
  kComplexDouble,  ///< as well
  kBytes,          ///< only moved
};
constexpr int kDtypes = static_cast<int>(Dtype::kBytes) + 1;

enum class Op : std::uint8_t { kSum, kAvg, kProduct, kMin, kMax, kAnd, kOr, kXor, kNone };
constexpr int kOps = static_cast<int>(Op::kNone);

const char* name_of(Dtype dtype);
const char* name_of(Op op);
std::size_t size_of(Dtype dtype);

/// A part of memory; what is read only is never written.
struct Span {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// Writes the reduction of from[0], from[1], ... in this order, to each of to[0] to to[num_to - 1]; these
/// may be among `from`. `stream`: past the cache.
using Reduce = void (*)(void* const* to, int num_to, const void* const* from, int num_from, std::size_t numel,
                        bool stream);
/// Copies through the cache, however large: what glibc's memcpy does not do from some size on.
using Copy = void (*)(void* to, const void* from, std::size_t bytes);

struct Kernels {
  const char* name;
  Reduce reduce[kDtypes][kOps];  ///< null where the operation means nothing
  Copy copy;
};

/// The best for this processor; COHORT_KERNELS names another. Throws: ConfigError when it has not that.
const Kernels& kernels();

/// Whether the operation means something for the type.
bool can_reduce(Dtype dtype, Op op);
/// Of kernels(). Throws: UsageError when it means nothing.
Reduce reducer(Dtype dtype, Op op);

/// While it lives, this thread rounds to nearest and keeps denormals, whatever set_flush_denormal() and
/// others made of it: sums then have the same bits on whichever thread of whichever rank they are made.
class StandardFloats {
 public:
  StandardFloats();
  ~StandardFloats();
  StandardFloats(const StandardFloats&) = delete;
  StandardFloats& operator=(const StandardFloats&) = delete;

 private:
  std::uint64_t before_;
};

/// All that this processor can run, the best first, null at the end.
const Kernels* const* all_kernels();

}  // namespace cohort::comm

// The same loops are compiled for several instruction sets, each as a table of functions. The first table
// that the processor can run is chosen, once, unless COHORT_KERNELS names another. Always: the list begins
// with the widest instructions and ends with the portable table, so there is one for every processor. A null
// entry in a table means that the operation has no sense for the type.
#include "cohort/comm/internal/kernels/kernels.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <array>
#include <string>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::comm {

namespace portable {
extern const Kernels table;
}
#if COHORT_KERNELS_X86
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {

// The control register of floating point arithmetic, and what it is where nobody has set it.
#if defined(__x86_64__)
constexpr std::uint64_t kStandard = 0x1F80;  // all exceptions masked
std::uint64_t control() {
  return _mm_getcsr() & ~std::uint64_t{0x3F};  // without the flags of what happened
}
void set_control(std::uint64_t bits) {
  _mm_setcsr(static_cast<unsigned>(bits));
}
#elif defined(__aarch64__)
constexpr std::uint64_t kStandard = 0;
std::uint64_t control() {
  std::uint64_t bits = 0;
  asm volatile("mrs %0, fpcr" : "=r"(bits));
  return bits;
}
void set_control(std::uint64_t bits) {
  asm volatile("msr fpcr, %0" : : "r"(bits));
}
#else
constexpr std::uint64_t kStandard = 0;
std::uint64_t control() {
  return kStandard;
}
void set_control(std::uint64_t /*bits*/) {}
#endif

}  // namespace

// at::set_flush_denormal() on one rank would change what this rank adds, and not what the others add.
StandardFloats::StandardFloats() : before_(control()) {
  if (before_ != kStandard) set_control(kStandard);
}

StandardFloats::~StandardFloats() {
  if (before_ != kStandard) set_control(before_);
}

const char* name_of(Dtype dtype) {
  constexpr std::array<const char*, kDtypes> names = {
      "float", "double", "half",  "bfloat16", "int8", "uint8",         "int16",          "uint16",
      "int32", "uint32", "int64", "uint64",   "bool", "complex float", "complex double", "bytes"};
  return names[static_cast<std::size_t>(dtype)];
}

const char* name_of(Op op) {
  constexpr std::array<const char*, kOps + 1> names = {"SUM",  "AVG", "PRODUCT", "MIN", "MAX",
                                                       "BAND", "BOR", "BXOR",    ""};
  return names[static_cast<std::size_t>(op)];
}

std::size_t size_of(Dtype dtype) {
  constexpr std::array<std::size_t, kDtypes> sizes = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1, 8, 16, 1};
  return sizes[static_cast<std::size_t>(dtype)];
}

const Kernels* const* all_kernels() {
  // At most three tables: the last entry stays null and ends the list.
  static const std::array<const Kernels*, 4> all = [] {
    std::array<const Kernels*, 4> list{};
    std::size_t count = 0;
#if COHORT_KERNELS_X86
    __builtin_cpu_init();
    // The AVX2 table converts half precision by F16C, which is a feature of its own.
    const bool has_avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
    if (has_avx2 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
        __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0) {
      list[count++] = &avx512::table;
    }
    if (has_avx2) list[count++] = &avx2::table;
#endif
    list[count] = &portable::table;
    return list;
  }();
  return all.data();
}

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const auto wanted = base::env_string("COHORT_KERNELS");
    base::TextList names;
    for (const Kernels* const* candidate = all_kernels(); *candidate != nullptr; ++candidate) {
      if (!wanted || *wanted == (*candidate)->name) return **candidate;
      names.add((*candidate)->name);
    }
    throw ConfigError("comm.kernels",
                      base::concat("COHORT_KERNELS is '", *wanted,
                                   "', expected one that this processor has: ", names.text()));
  }();
  return chosen;
}

bool can_reduce(Dtype dtype, Op op) {
  return kernels().reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)] != nullptr;
}

Reduce reducer(Dtype dtype, Op op) {
  if (!can_reduce(dtype, op)) {
    throw UsageError("comm.kernels", base::concat(name_of(op), " of ", name_of(dtype), " means nothing"));
  }
  return kernels().reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
}

}  // namespace cohort::comm

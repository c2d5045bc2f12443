// Fuzzes the IDX reader: any bytes either give an array whose size is what its shape says, or a DataError.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "cohort/base/error.h"
#include "cohort/data/idx.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    // 1 MiB: a compressed file of a few bytes may rightly ask for a thousand times its length.
    const auto array =
        cohort::data::parse_idx(std::as_bytes(std::span(data, size)), "fuzz", {.max_bytes = 1 << 20});
    std::size_t expected = cohort::data::idx_type_bytes(array.type);
    for (const std::int64_t extent : array.shape) expected *= static_cast<std::size_t>(extent);
    if (expected != array.bytes.size()) std::abort();
  } catch (const cohort::DataError&) {
  }
  return 0;
}

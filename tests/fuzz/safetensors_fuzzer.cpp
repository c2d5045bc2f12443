// Fuzzes the safetensors header: any bytes either give entries that cover their data exactly, and a header
// that is written back the same, or a DataError.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "cohort/base/error.h"
#include "cohort/checkpoint/safetensors_format.h"

using namespace cohort::checkpoint;

namespace {

void check(const SafetensorsHeader& header, std::size_t size) {
  std::uint64_t covered = 0;
  for (const TensorEntry& entry : header.entries) {
    std::uint64_t bits = static_cast<std::uint64_t>(dtype_bits(entry.dtype));
    for (const std::int64_t extent : entry.shape) bits *= static_cast<std::uint64_t>(extent);
    if (entry.begin != covered || (entry.end - entry.begin) * 8 != bits) std::abort();
    covered = entry.end;
  }
  if (header.data_start + covered != size) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  SafetensorsHeader header;
  try {
    header = parse_header(std::as_bytes(std::span(data, size)), "fuzz");
  } catch (const cohort::DataError&) {
    return 0;
  }
  check(header, size);
  const std::uint64_t data_bytes = header.entries.empty() ? 0 : header.entries.back().end;
  const std::string written = make_header(header.entries, header.metadata);
  const std::string file = written + std::string(data_bytes, '\0');
  SafetensorsHeader again = parse_header(std::as_bytes(std::span(file.data(), file.size())), "again");
  check(again, file.size());
  if (make_header(again.entries, again.metadata) != written) std::abort();
  return 0;
}

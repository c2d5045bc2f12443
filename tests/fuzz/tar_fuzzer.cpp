// Fuzzes the reader of tar files: any bytes either give files and folders with names that stay inside a
// folder, within the limits, or a DataError.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "cohort/base/error.h"
#include "cohort/data/tar_reader.h"

using namespace cohort::data;

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

void read_all(std::span<const std::byte> bytes, const TarOptions& options) {
  TarReader reader(bytes, "fuzz", options);
  std::int64_t entries = 0, total = 0;
  while (const auto entry = reader.next()) {
    check(++entries <= options.max_entries);
    check(!entry->path.empty() && entry->path.is_relative());
    for (const auto& part : entry->path) check(part != ".." && part != "." && !part.empty());
    if (entry->is_folder) continue;
    std::int64_t reached = 0;
    const std::int64_t length =
        reader.read_content([&](std::int64_t offset, std::span<const std::byte> piece) {
          check(offset >= 0);
          reached = std::max(reached, offset + std::ssize(piece));
          check(reached <= options.max_bytes);
        });
    check(length >= reached);
    total += length;
    check(total <= options.max_bytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  for (const int strip : {0, 1}) {
    try {
      read_all(std::as_bytes(std::span(data, size)),
               {.strip = strip, .max_bytes = 1 << 20, .max_entries = 100});
    } catch (const cohort::DataError&) {
    }
  }
  return 0;
}

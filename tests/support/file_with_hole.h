#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string_view>

#include "tests/support/temp_dir.h"

namespace cohort::test {

/// Writes `head`, `hole` zeros that take no room on disk, and `tail`.
inline void write_file_with_hole(const std::filesystem::path& path, std::string_view head, std::uint64_t hole,
                                 std::string_view tail) {
  write_file(path, head);
  std::filesystem::resize_file(path, head.size() + hole);
  std::ofstream file(path, std::ios::binary | std::ios::app);
  file.write(tail.data(), static_cast<std::streamsize>(tail.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path.string());
}

/// Bytes of a file that a test writes or reads whole: 4 GiB where it runs under label slow, else 1 MiB.
inline std::uint64_t large_size() {
  return std::getenv("COHORT_LARGE_FILES") == nullptr ? 1 << 20 : std::uint64_t{1} << 32;
}

}  // namespace cohort::test

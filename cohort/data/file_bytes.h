#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

/// Whole files, read into memory that is used again. No LibTorch.
namespace cohort::data {

/// Reads the file `name`, seen from the open folder `folder` (or AT_FDCWD), into `buffer`, which grows when
/// it must and never shrinks. The span lies in `buffer`. Four system calls for a file smaller than the
/// buffer. Throws: DataError naming `shown` and the system's reason, or where a device or
/// a pipe does not end.
std::span<const std::byte> read_file_bytes(int folder, const char* name, const std::string& shown,
                                           std::vector<std::byte>& buffer);

/// Reads the file at `path`.
std::span<const std::byte> read_file_bytes(const std::string& path, std::vector<std::byte>& buffer);

}  // namespace cohort::data

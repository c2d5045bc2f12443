#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace cohort::base {

/// Returns the bytes of a file that only this process's user, or root, can read or change: of a secret or a
/// password, without spaces and line ends at their end. At most `max_bytes` and one more. Throws: UsageError
/// with the code `where`, which begins "`what`, PATH,", for a file that is not there, belongs to another
/// user, or may be read by others.
std::string read_private_file(const std::filesystem::path& path, const char* where, const char* what,
                              std::size_t max_bytes);

}  // namespace cohort::base

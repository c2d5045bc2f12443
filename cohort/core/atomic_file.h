#pragma once

#include <filesystem>
#include <string_view>

namespace cohort::core {

/// `path` holds `content`, whole and on disk; a reader sees either the old file or the new one, even when the
/// process or the machine dies in between. The folder must exist. Throws: SystemError naming the file and the
/// bytes (no space left, permission); the old file is then untouched.
void write_file_atomically(const std::filesystem::path& path, std::string_view content);

/// Everything renamed into or removed from `folder` is on disk. Throws: SystemError.
void sync_folder(const std::filesystem::path& folder);

}  // namespace cohort::core

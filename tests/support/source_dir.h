#pragma once

#include <filesystem>

namespace cohort::test {

/// Returns the root of Cohort's sources. A function, in a file that CMake writes, so that no other file's
/// compilation holds the folder's name: a compiler's cache then serves every clone.
std::filesystem::path source_dir();

}  // namespace cohort::test

#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

#include "tests/support/source_dir.h"

namespace cohort::test {

/// A new empty folder that is removed, with all in it, when this object goes.
///
///     TempDir dir;
///     write_file(dir / "a.txt", "hello");
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "cohort test XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      throw std::runtime_error("cannot make a temporary folder " + pattern + ": " + std::strerror(errno));
    }
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    // A test may have taken permissions away; give them back so that the folder can be removed.
    for (const auto& entry : std::filesystem::recursive_directory_iterator(
             path_, std::filesystem::directory_options::skip_permission_denied, ignored)) {
      if (entry.is_directory(ignored) && !entry.is_symlink(ignored)) {
        std::filesystem::permissions(entry.path(), std::filesystem::perms::owner_all,
                                     std::filesystem::perm_options::add, ignored);
      }
    }
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

/// Returns every byte of a file; throws when it cannot be read, so that a missing file fails its test.
inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// Writes `bytes` to `path`, making the folders above it.
inline void write_file(const std::filesystem::path& path, std::string_view bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path.string());
}

/// Returns the path of a golden file, `tests/golden/<name>`, which was made by the script beside it. Fails
/// the test that asks when it is not there.
inline std::filesystem::path golden_path(std::string_view name) {
  std::filesystem::path path = source_dir() / "tests/golden" / name;
  if (!std::filesystem::exists(path)) throw std::runtime_error("golden file is missing: " + path.string());
  return path;
}

/// Returns the bytes of a golden file.
inline std::string read_golden(std::string_view name) {
  return read_file(golden_path(name));
}

}  // namespace cohort::test

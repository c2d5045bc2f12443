#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace cohort::checkpoint {

/// A whole file mapped into memory, private to this process: writing to the bytes changes this process'
/// copy of a page and never the file.
/// Ownership: shared; the mapping lives as long as one holder does, also after the file was deleted. A
/// file that is shortened in place while it is mapped kills its readers (SIGBUS), so Cohort writes
/// files under a temporary name and renames them.
class MappedFile {
 public:
  /// Throws: DataError if `path` is missing, not a regular file or cannot be read; SystemError if the system
  /// will not map it.
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  /// The same for the file of that name in a folder that is open; null if there is none. Messages say `path`.
  static std::shared_ptr<const MappedFile> open_in(int folder, const std::filesystem::path& path);

  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  /// The file's content. Written to, it changes for this process alone, and not on disk.
  std::span<std::byte> bytes() const { return bytes_; }
  std::uint64_t size() const { return bytes_.size(); }
  /// The path that messages say.
  const std::filesystem::path& path() const { return path_; }

 private:
  MappedFile(std::filesystem::path path, std::span<std::byte> bytes)
      : path_(std::move(path)), bytes_(bytes) {}
  static std::shared_ptr<const MappedFile> map(int file, const std::filesystem::path& path);

  std::filesystem::path path_;
  std::span<std::byte> bytes_;
};

}  // namespace cohort::checkpoint

#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

/// Files on disk that are there wholly or not at all; no LibTorch.
namespace cohort::checkpoint {

/// The xxh3-64 checksum of `bytes`.
std::uint64_t checksum(std::span<const std::byte> bytes);
/// A checksum as 16 hexadecimal digits.
std::string checksum_text(std::uint64_t checksum);

/// What was written: size and xxh3-64 checksum.
struct FileSummary {
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
};

/// Writes one new file from front to back, counting and checksumming on the way.
/// A file that was not finished is removed by the destructor.
///
///     FileWriter writer("model.tmp", expected_bytes);
///     writer.write(header);
///     FileSummary summary = writer.finish();  // on disk now
class FileWriter {
 public:
  /// Creates `path`, which must not exist, and reserves `expected_bytes`, so that a full disk is known
  /// at once.
  /// Throws: SystemError naming path, bytes needed and the system's reason; so do write() and finish().
  FileWriter(std::filesystem::path path, std::uint64_t expected_bytes);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  /// Appends to the file and to the checksum.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);

  /// Waits until the file is on disk and closes it. No call may follow.
  FileSummary finish();

 private:
  void write_through(std::span<const std::byte> bytes);
  [[noreturn]] void fail(const char* operation) const;

  std::filesystem::path path_;
  std::uint64_t expected_bytes_;
  int file_ = -1;
  FileSummary summary_;
  std::vector<std::byte> buffer_;
  std::uint64_t started_writeback_ = 0;
  struct Hash;
  std::unique_ptr<Hash> hash_;
};

/// Renames `from` to `to`, replacing a file (not a folder), and syncs the folder of `to`.
/// Throws: SystemError.
void rename_and_sync(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace cohort::checkpoint

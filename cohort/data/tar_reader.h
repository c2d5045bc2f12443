#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>

struct archive;

/// Tar files from people one need not trust, entry by entry, without writing anything. No LibTorch.
namespace cohort::data {

/// What a reader of tar files leaves out and rejects.
struct TarOptions {
  /// Leave out the first parts of each name.
  int strip = 0;
  /// An archive that holds more is rejected before more is unpacked: the lengths that its entries claim are
  /// added up, holes and entries that are passed over included.
  std::int64_t max_bytes = std::int64_t{256} << 30;
  /// Files and folders, those that only the names of others mention among them.
  std::int64_t max_entries = 20'000'000;
};

/// Reads plain tar files and those compressed with gzip, bzip2, xz or zstd, by libarchive's own code: no
/// other program is started. Names are taken byte for byte, whatever the locale.
class TarReader {
 public:
  /// Reads the file `path`. Throws: DataError if it cannot be opened or is no such archive.
  TarReader(const std::string& path, const TarOptions& options);
  /// Reads an archive in memory, which must outlive the reader; `name` stands in the messages.
  TarReader(std::span<const std::byte> bytes, const std::string& name, const TarOptions& options);

  /// A file or a folder of the archive.
  struct TarEntry {
    /// Never empty, never absolute, without `.` and `..`.
    std::filesystem::path path;
    bool is_folder = false;
  };
  /// Returns the next file or folder, or nothing at the end.
  /// Throws: DataError naming the archive, and the entry where it is a link or a device, has no name, an
  /// absolute one or one that leads out, or where a limit is passed.
  std::optional<TarEntry> next();

  /// Takes a piece of a file and its place in it.
  using Sink = std::function<void(std::int64_t offset, std::span<const std::byte> bytes)>;
  /// Gives the content of the file that next() returned last to `sink`; returns its length.
  /// Throws: DataError naming the archive.
  std::int64_t read_content(const Sink& sink);

 private:
  struct Free {
    void operator()(archive* a) const;
  };
  void check_status(int status) const;
  void count(const std::filesystem::path& path, bool is_folder);
  void check_lengths(std::int64_t bytes) const;

  std::string name_;
  TarOptions options_;
  std::unique_ptr<archive, Free> archive_;
  std::int64_t entries_ = 0;
  std::unordered_set<std::size_t> folders_;  // hashes of their names: those counted
  std::int64_t bytes_ = 0;                   // what the entries before the current one hold
};

}  // namespace cohort::data

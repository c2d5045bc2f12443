#pragma once

#include <cstddef>
#include <filesystem>
#include <string_view>

/// Files that are whole or not there, whatever ends the process or the machine meanwhile.
namespace cohort::base {

/// A file that is written bit by bit and appears under its name only when commit() returns. Without a commit
/// nothing stays behind; a process that is killed leaves a file `NAME.tmp.PID.N`.
///
///     AtomicFile file("model.safetensors");
///     file.write(header);
///     file.write(body);
///     file.commit();
///
/// The folder must exist. Threads: one caller at a time; several files of one name are fine, the last commit
/// wins. Throws: SystemError naming the file and the bytes (no space left, permission); a file of that name
/// which was there before is untouched.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Appends bytes to the file, which is not seen yet. Throws: UsageError after commit() or a failed write.
  void write(const void* data, std::size_t num_bytes);
  void write(std::string_view bytes) { write(bytes.data(), bytes.size()); }
  /// Everything written is on disk under the name; call it once.
  void commit();

 private:
  [[noreturn]] void fail(int error);

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  std::size_t num_bytes_ = 0;  // asked for so far
  int file_ = -1;
};

/// `path` holds `content`, whole and on disk; a reader sees either the old file or the new one. Throws: as
/// AtomicFile.
void write_file_atomically(const std::filesystem::path& path, std::string_view content);

/// Everything renamed into or removed from `folder` is on disk. Throws: SystemError.
void sync_folder(const std::filesystem::path& folder);

}  // namespace cohort::base

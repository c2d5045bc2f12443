#pragma once

#include <filesystem>

namespace cohort::core {

/// A file that one process holds at a time. The kernel lets go of it when the process ends, however it ends,
/// so nothing stale stays behind.
class FileLock {
 public:
  /// Throws: SystemError at once, naming the process that holds the lock.
  explicit FileLock(const std::filesystem::path& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int file_ = -1;
};

}  // namespace cohort::core

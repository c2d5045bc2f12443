#pragma once

#include <cstdint>
#include <filesystem>

namespace cohort::base {

/// Returns whether flock() has said, by errno, that the file system has no locks.
bool means_no_locks(int error);

/// A file that one process holds at a time, or several that all share it. The kernel lets go of it when the
/// process ends, however it ends, so nothing stale stays behind.
class FileLock {
 public:
  enum class Mode : std::uint8_t { kAlone, kShared };

  /// Where the file system has no locks (NFS without a lock service, Lustre without -o flock, some FUSE), a
  /// warning says once for each folder that nothing keeps a second process out.
  /// Throws: SystemError at once, naming the process that holds the lock.
  explicit FileLock(const std::filesystem::path& path, Mode mode = Mode::kAlone);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  /// True if no other process can hold the lock now; false where the file system has no locks.
  bool is_held() const { return is_held_; }

 private:
  int file_ = -1;
  bool is_held_ = true;
};

}  // namespace cohort::base

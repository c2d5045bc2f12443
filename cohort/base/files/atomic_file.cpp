// Bytes go to a temporary file beside the target. commit() syncs the file, renames it, and syncs the folder,
// in this order. So the name never stands for bytes that are not on disk. Always: until rename() the old file
// stands untouched, and a temporary name holds process and count, so no two writers share it.
#include "cohort/base/files/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::base {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void reject_path(const fs::path& path, const std::string& what, int error) {
  std::string hint;
  if (error == ENOSPC || error == EFBIG || error == EDQUOT) hint = "freeing space, or another folder";
  if (error == ENOENT || error == ENOTDIR) hint = concat("making the folder ", path.parent_path().string());
  if (error == EACCES || error == EROFS || error == EPERM) hint = "a folder that this user may write to";
  throw SystemError("base.write_file", concat("cannot ", what, ": ", std::strerror(error)), hint);
}

}  // namespace

AtomicFile::AtomicFile(fs::path path) : path_(std::move(path)) {
  static std::atomic<unsigned> number{0};
  // In the target's folder, since rename() does not go from one file system to another.
  temporary_ = concat(path_.string(), ".tmp.", ::getpid(), ".", number++);
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file_ < 0) reject_path(path_, concat("write ", path_.string()), errno);
}

AtomicFile::~AtomicFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::fail(int error) {
  ::close(std::exchange(file_, -1));
  ::unlink(temporary_.c_str());
  reject_path(path_, concat("write ", path_.string(), " (", num_bytes_, " bytes)"), error);
}

void AtomicFile::write(const void* data, std::size_t num_bytes) {
  if (file_ < 0)
    throw UsageError("base.write_file", concat(path_.string(), " is closed: committed or failed before"));
  num_bytes_ += num_bytes;
  const char* next = static_cast<const char*>(data);
  for (std::size_t left = num_bytes; left > 0;) {
    // A large write may be done in parts, and a signal may interrupt it.
    const ssize_t written = ::write(file_, next, left);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(errno);
    next += written;
    left -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  if (file_ < 0)
    throw UsageError("base.write_file", concat(path_.string(), " is closed: committed or failed before"));
  // A file system such as tmpfs or a pipe cannot sync and says EINVAL: it has no disk to lose.
  if (::fsync(file_) != 0 && errno != EINVAL) fail(errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail(errno);
  // NFS may report an error of a write as late as here.
  if (::close(std::exchange(file_, -1)) != 0) reject_path(path_, concat("close ", path_.string()), errno);
  sync_folder(path_.has_parent_path() ? path_.parent_path() : fs::path("."));
}

void write_file_atomically(const fs::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

void sync_folder(const fs::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) reject_path(folder, concat("open folder ", folder.string()), errno);
  const int error = ::fsync(file) == 0 ? 0 : errno;
  ::close(file);
  if (error != 0 && error != EINVAL) reject_path(folder, concat("sync folder ", folder.string()), error);
}

}  // namespace cohort::base

#include "cohort/core/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "cohort/core/error.h"

namespace cohort::core {

FileLock::FileLock(const std::filesystem::path& path) {
  file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file_ < 0)
    throw SystemError("core.lock", concat("cannot open ", path.string(), ": ", std::strerror(errno)));
  if (flock(file_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    char holder[32] = {};
    const ssize_t length = pread(file_, holder, sizeof holder - 1, 0);
    close(file_);
    if (error != EWOULDBLOCK) {
      throw SystemError("core.lock", concat("cannot lock ", path.string(), ": ", std::strerror(error)));
    }
    throw SystemError(
        "core.lock",
        concat(path.parent_path().string(), " is in use by process ", length > 0 ? holder : "unknown"),
        "waiting for it, or another folder");
  }
  const std::string pid = std::to_string(getpid());
  if (ftruncate(file_, 0) == 0) {
    // The number is only for the message above: without it the lock is still held.
    [[maybe_unused]] const ssize_t written = pwrite(file_, pid.data(), pid.size(), 0);
  }
}

FileLock::~FileLock() {
  close(file_);
}

}  // namespace cohort::core

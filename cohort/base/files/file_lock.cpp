#include "cohort/base/files/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/log.h"

namespace cohort::base {
namespace {

std::string folder_of(const std::filesystem::path& path) {
  return std::filesystem::absolute(path).parent_path().string();
}

}  // namespace

bool means_no_locks(int error) {
  return error == ENOSYS || error == ENOLCK || error == EOPNOTSUPP;
}

FileLock::FileLock(const std::filesystem::path& path, Mode mode) {
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file_ < 0) {
    throw SystemError("base.lock", concat("cannot open ", path.string(), ": ", std::strerror(errno)));
  }
  const int operation = mode == Mode::kAlone ? LOCK_EX : LOCK_SH;
  // Not waited for: a second run in one folder is a mistake, and no queue.
  if (::flock(file_, operation | LOCK_NB) != 0) {
    const int error = errno;
    if (means_no_locks(error)) {
      is_held_ = false;
      const std::string folder = folder_of(path);
      warn_once("base.lock " + folder,
                concat("[base.lock] ", folder, " is on a file system without locks (", std::strerror(error),
                       "): nothing keeps a second process from writing to it"));
      return;
    }
    std::array<char, 300> holder{};
    const ssize_t length = ::pread(file_, holder.data(), holder.size() - 1, 0);
    ::close(file_);
    if (error != EWOULDBLOCK) {
      throw SystemError("base.lock", concat("cannot lock ", path.string(), ": ", std::strerror(error)));
    }
    throw SystemError(
        "base.lock",
        concat(folder_of(path), " is in use by process ", length > 0 ? holder.data() : "unknown"),
        "waiting for it, or another folder");
  }
  // The name is only for the message above: without it the lock is held all the same. With the host, since on
  // a shared file system the holder may be on another machine.
  const std::string name = concat(::getpid(), " on ", host_name());
  if (::ftruncate(file_, 0) == 0) [[maybe_unused]]
    const ssize_t written = ::pwrite(file_, name.data(), name.size(), 0);
}

// To close the file ends the lock. The file stays: if it were removed, two processes could lock two files of
// one name.
FileLock::~FileLock() {
  ::close(file_);
}

}  // namespace cohort::base

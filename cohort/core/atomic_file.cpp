#include "cohort/core/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "cohort/core/error.h"

namespace cohort::core {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void fail(const fs::path& path, const char* what, int error, std::size_t bytes) {
  throw SystemError(
      "core.write_file",
      concat("cannot ", what, " ", path.string(), " (", bytes, " bytes): ", std::strerror(error)),
      error == ENOSPC || error == EFBIG ? "freeing space, or another folder" : "");
}

}  // namespace

void write_file_atomically(const fs::path& path, std::string_view content) {
  const fs::path temporary = path.string() + ".tmp." + std::to_string(getpid());
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) fail(path, "write", errno, content.size());
  int error = 0;
  for (std::size_t done = 0; done < content.size() && error == 0;) {
    const ssize_t written = write(file, content.data() + done, content.size() - done);
    if (written >= 0) {
      done += static_cast<std::size_t>(written);
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error == 0 && fsync(file) != 0) error = errno;
  if (close(file) != 0 && error == 0) error = errno;
  if (error == 0 && rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) {
    unlink(temporary.c_str());
    fail(path, "write", error, content.size());
  }
  sync_folder(path.has_parent_path() ? path.parent_path() : fs::path("."));
}

void sync_folder(const fs::path& folder) {
  const int file = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) fail(folder, "open", errno, 0);
  const int status = fsync(file);
  const int error = errno;
  close(file);
  if (status != 0 && error != EINVAL) fail(folder, "sync", error, 0);  // EINVAL: this file system cannot
}

}  // namespace cohort::core

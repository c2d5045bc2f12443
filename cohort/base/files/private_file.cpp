#include "cohort/base/files/private_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/files/read_at.h"

namespace cohort::base {

std::string read_private_file(const std::filesystem::path& path, const char* where, const char* what,
                              std::size_t max_bytes) {
  const auto reject = [&](const std::string& problem, const std::string& hint) {
    throw UsageError(where, concat(what, ", ", path.string(), ", ", problem), hint);
  };
  // O_NONBLOCK: to open a named pipe would wait for a writer.
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file.is_open() || ::fstat(file.get(), &status) != 0) {
    reject(concat("cannot be read: ", std::strerror(errno)), "a file that is there on each node");
  }
  if (!S_ISREG(status.st_mode)) reject("is no regular file", "a file of one's own");
  // Its owner can write something else into it.
  if (status.st_uid != ::geteuid() && status.st_uid != 0) {
    reject(concat("belongs to user ", status.st_uid, ", and this is a process of user ", ::geteuid()),
           concat("a file of one's own: chown ", ::geteuid(), " ", path.string()));
  }
  if ((status.st_mode & 077) != 0) reject("may be read by others", concat("chmod 600 ", path.string()));
  std::string bytes = read_at(file.get(), 0, max_bytes + 1);
  // Editors and base64 end a file by a newline, which belongs to no secret.
  const std::size_t end = bytes.find_last_not_of(" \t\r\n");
  bytes.resize(end == std::string::npos ? 0 : end + 1);
  return bytes;
}

}  // namespace cohort::base

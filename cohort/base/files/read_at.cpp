#include "cohort/base/files/read_at.h"

#include <unistd.h>

#include <cerrno>

namespace cohort::base {

std::string read_at(int fd, std::int64_t begin, std::size_t max_bytes) {
  std::string bytes(max_bytes, '\0');
  std::size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t got = ::pread(fd, bytes.data() + have, bytes.size() - have,
                                static_cast<off_t>(begin) + static_cast<off_t>(have));
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = 0;
    if (got <= 0) break;
    have += static_cast<std::size_t>(got);
  }
  bytes.resize(have);
  return bytes;
}

}  // namespace cohort::base

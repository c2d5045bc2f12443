#include "cohort/data/file_bytes.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cohort/core/error.h"

namespace cohort::data {
namespace {

constexpr std::size_t kFirstBuffer = 64 * 1024;

[[noreturn]] void fail(const std::string& shown, const char* what) {
  throw DataError("data.read", core::concat("cannot ", what, " ", shown, ": ", std::strerror(errno)));
}

struct Descriptor {
  int fd;
  ~Descriptor() { ::close(fd); }
};

}  // namespace

std::span<const std::byte> read_file_bytes(int folder, const char* name, const std::string& shown,
                                           std::vector<std::byte>& buffer) {
  const Descriptor file{::openat(folder, name, O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) fail(shown, "open");
  if (buffer.size() < kFirstBuffer) buffer.resize(kFirstBuffer);
  std::size_t size = 0;
  for (;;) {
    const ssize_t got = ::read(file.fd, buffer.data() + size, buffer.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(shown, "read");
    size += static_cast<std::size_t>(got);
    // A regular file gives less than asked for only at its end, so a second read would return 0.
    if (size < buffer.size()) return {buffer.data(), size};
    buffer.resize(buffer.size() * 2);
  }
}

std::span<const std::byte> read_file_bytes(const std::string& path, std::vector<std::byte>& buffer) {
  return read_file_bytes(AT_FDCWD, path.c_str(), path, buffer);
}

}  // namespace cohort::data

#include "cohort/data/file_bytes.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"

namespace cohort::data {
namespace {

// Most images of a training set are smaller, and then no fstat() is needed: one system call less for each
// file.
constexpr std::size_t kFirstBuffer = 64 * 1024;
constexpr std::size_t kMaxOfAStream = std::size_t{1} << 30;

[[noreturn]] void fail(const std::string& shown, const char* what) {
  throw DataError("data.read", base::concat("cannot ", what, " ", shown, ": ", std::strerror(errno)));
}

// Room for what is left of a file of which `size` bytes were read, and for the read that finds its end.
std::size_t larger_buffer(int file, const std::string& shown, std::size_t size) {
  struct stat status {};
  // A pipe says no length; the limit ends what never ends.
  if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    if (size < kMaxOfAStream) return 2 * size;
    throw DataError("data.read",
                    base::concat(shown, " is no regular file and does not end after ", size, " bytes"));
  }
  return std::max(size + kFirstBuffer, static_cast<std::size_t>(status.st_size) + 1);
}

}  // namespace

std::span<const std::byte> read_file_bytes(int folder, const char* name, const std::string& shown,
                                           std::vector<std::byte>& buffer) {
  // Without O_NOFOLLOW: data sets are often made of links.
  const base::Fd file(::openat(folder, name, O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) fail(shown, "open");
  if (buffer.size() < kFirstBuffer) buffer.resize(kFirstBuffer);
  std::size_t size = 0;
  for (;;) {
    const ssize_t got = ::read(file.get(), buffer.data() + size, buffer.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(shown, "read");
    // Only 0 is the end: FUSE may give less than asked for, and Linux gives at most 2 GiB - 4 KiB at once.
    if (got == 0) return {buffer.data(), size};
    size += static_cast<std::size_t>(got);
    if (size == buffer.size()) buffer.resize(larger_buffer(file.get(), shown, size));
  }
}

std::span<const std::byte> read_file_bytes(const std::string& path, std::vector<std::byte>& buffer) {
  return read_file_bytes(AT_FDCWD, path.c_str(), path, buffer);
}

}  // namespace cohort::data

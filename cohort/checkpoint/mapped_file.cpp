#include "cohort/checkpoint/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"

namespace cohort::checkpoint {

// O_NONBLOCK: opening a fifo by mistake must not wait for a writer.
constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path) {
  return map(::open(path.c_str(), kFlags), path);
}

std::shared_ptr<const MappedFile> MappedFile::open_in(int folder, const std::filesystem::path& path) {
  const int file = ::openat(folder, path.filename().c_str(), kFlags);
  return file < 0 && errno == ENOENT ? nullptr : map(file, path);
}

std::shared_ptr<const MappedFile> MappedFile::map(int file, const std::filesystem::path& path) {
  if (file < 0) {
    throw DataError("checkpoint.open",
                    base::concat("cannot open ", path.string(), ": ", std::strerror(errno)));
  }
  struct stat status {};
  const bool regular = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  void* address = nullptr;
  const auto size = static_cast<size_t>(regular ? status.st_size : 0);
  int error = 0;
  if (size > 0) {
    // Private and writable: a tensor may be changed in place, which copies the page and leaves the file
    // alone. NORESERVE: without it the whole file would count as memory that may be needed.
    address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
    error = address == MAP_FAILED ? errno : 0;
  }
  // The mapping stays without the descriptor.
  ::close(file);
  if (!regular) {
    throw DataError("checkpoint.open", base::concat(path.string(), " is not a regular file"));
  }
  if (error != 0) {
    throw SystemError("checkpoint.open", base::concat("cannot map ", path.string(), " (", size,
                                                      " bytes): ", std::strerror(error)));
  }
  std::span<std::byte> bytes(static_cast<std::byte*>(address), size);
  return std::shared_ptr<const MappedFile>(new MappedFile(path, bytes));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) {
    ::munmap(bytes_.data(), bytes_.size());
  }
}

}  // namespace cohort::checkpoint

#include "cohort/base/files/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/base/files/memory_file.h"

namespace cohort::base {
namespace {

[[noreturn]] void fail(const char* where, const char* what, std::size_t bytes, int error) {
  throw SystemError(where, concat(what, " of ", bytes, " bytes: ", std::strerror(error)),
                    "free memory, or raise the limit of the container or job");
}

}  // namespace

SharedMemory SharedMemory::create(const char* where, std::size_t bytes, bool reserve) {
  Fd fd = make_memory_file("cohort");
  if (!fd.is_open()) fail(where, "cannot make shared memory", bytes, errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    fail(where, "cannot size shared memory", bytes, errno);
  if (reserve && bytes > 0) {
    int result = 0;
    do {
      result = ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    } while (result == EINTR);
    if (result != 0) fail(where, "cannot reserve shared memory", bytes, result);
  }
  // Nobody can make it shorter under those who map it.
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  SharedMemory memory = map(where, fd);
  memory.fd_ = std::move(fd);
  return memory;
}

SharedMemory SharedMemory::map(const char* where, const Fd& fd) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) fail(where, "cannot look at shared memory", 0, errno);
  // Memory that becomes shorter under those who map it ends them by a signal.
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) fail(where, "cannot trust shared memory", 0, EPERM);
  SharedMemory memory;
  const auto size = static_cast<std::size_t>(status.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) fail(where, "cannot map shared memory", size, errno);
  memory.data_ = static_cast<std::byte*>(data);
  memory.size_ = size;
  return memory;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace cohort::base

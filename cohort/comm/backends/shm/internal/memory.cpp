#include "cohort/comm/backends/shm/internal/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/base/files/memory_file.h"

namespace cohort::comm::shm {
namespace {

[[noreturn]] void fail(const char* what, std::size_t bytes, int error) {
  throw SystemError("comm.shm", base::concat(what, " of ", bytes, " bytes: ", std::strerror(error)),
                    "free memory, or raise the limit of the container or job");
}

}  // namespace

SharedMemory SharedMemory::create(std::size_t bytes, bool reserve) {
  base::Fd fd = base::make_memory_file("cohort");
  if (!fd.is_open()) fail("cannot make shared memory", bytes, errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fail("cannot size shared memory", bytes, errno);
  if (reserve && bytes > 0) {
    int result = 0;
    do {
      result = ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    } while (result == EINTR);
    if (result != 0) fail("cannot reserve shared memory", bytes, result);
  }
  // Nobody can make it shorter under those who map it.
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  SharedMemory memory = map(fd);
  memory.fd_ = std::move(fd);
  return memory;
}

SharedMemory SharedMemory::map(const base::Fd& fd) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) fail("cannot look at shared memory", 0, errno);
  SharedMemory memory;
  const auto size = static_cast<std::size_t>(status.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) fail("cannot map shared memory", size, errno);
  memory.data_ = static_cast<std::byte*>(data);
  memory.size_ = size;
  return memory;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace cohort::comm::shm

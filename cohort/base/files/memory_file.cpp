#include "cohort/base/files/memory_file.h"

#include <sys/mman.h>

#include <cerrno>

namespace cohort::base {

Fd make_memory_file(const char* name) {
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
  // Since Linux 6.3 a system may want to be told that it holds no program (vm.memfd_noexec = 2).
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL));
  if (!fd.is_open() && errno == EINVAL) fd = Fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  return fd;
}

}  // namespace cohort::base

#include "cohort/comm/numeric_names.h"

#include <dlfcn.h>
#include <netdb.h>
#include <sys/socket.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace cohort::comm {
namespace {

using Names = int (*)(const sockaddr*, socklen_t, char*, socklen_t, char*, socklen_t, int);

// The library that holds `address`.
const void* library_of(const void* address) {
  Dl_info found{};
  return ::dladdr(address, &found) != 0 ? found.dli_fbase : nullptr;
}

const void* libtorch() {
  static const void* const base = library_of(reinterpret_cast<const void*>(&typeid(c10d::TCPStore)));
  return base;
}

}  // namespace

void use_numeric_names() {}

}  // namespace cohort::comm

// Stands before that of the C library, which does the work.
extern "C" __attribute__((visibility("default"))) int getnameinfo(const sockaddr* address, socklen_t size,
                                                                  char* host, socklen_t host_size,
                                                                  char* service, socklen_t service_size,
                                                                  int flags) {
  static const auto real = reinterpret_cast<cohort::comm::Names>(::dlsym(RTLD_NEXT, "getnameinfo"));
  const void* const caller = cohort::comm::library_of(__builtin_return_address(0));
  if (caller != nullptr && caller == cohort::comm::libtorch()) flags |= NI_NUMERICHOST;
  return real(address, size, host, host_size, service, service_size, flags);
}

#pragma once

#include <dlfcn.h>
#include <netdb.h>

/// For tests that stand before the C library's getaddrinfo() with one of their own.
namespace cohort::test {

/// That of the C library.
inline int real_getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** found) {
  static const auto real = reinterpret_cast<decltype(&::getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  return real(name, service, hints, found);
}

/// Whether a name server is asked, and not only for what a number means.
inline bool asks_name_server(const char* name, const addrinfo* hints) {
  return name != nullptr && (hints == nullptr || (hints->ai_flags & AI_NUMERICHOST) == 0);
}

}  // namespace cohort::test

#include "cohort/core/allocator.h"

#include <dlfcn.h>
#include <malloc.h>

#include <array>
#include <climits>
#include <cstdlib>
#include <string>
#include <string_view>

#include "cohort/core/env.h"
#include "cohort/core/log.h"

namespace cohort::core {
namespace {

// jemalloc, mimalloc or a sanitizer takes malloc's place and leaves glibc's mallopt without effect.
bool malloc_is_glibc() {
#ifdef __GLIBC__
  Dl_info info{};
  void* const address = ::dlsym(RTLD_DEFAULT, "malloc");
  if (address == nullptr || ::dladdr(address, &info) == 0 || info.dli_fname == nullptr) return false;
  return std::string_view(info.dli_fname).find("/libc.so") != std::string_view::npos ||
         std::string_view(info.dli_fname).find("/libc-2") != std::string_view::npos;
#else
  return false;
#endif
}

bool user_tuned_malloc() {
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  if (tunables != nullptr && std::string_view(tunables).find("glibc.malloc.") != std::string_view::npos)
    return true;
  return std::getenv("MALLOC_MMAP_THRESHOLD_") != nullptr || std::getenv("MALLOC_TRIM_THRESHOLD_") != nullptr;
}

}  // namespace

bool tune_allocator() {
  static const std::array<std::string, 2> choices = {"tuned", "system"};
  if (env_choice("COHORT_ALLOCATOR", choices).value_or("tuned") == "system" || user_tuned_malloc())
    return false;
  if (!malloc_is_glibc()) {
    warn_once("core.allocator", "malloc is not glibc's: tune_allocator() has no effect here");
    return false;
  }
#ifdef __GLIBC__
  // Some versions refuse a threshold above 32 MiB (the most that one arena's heap holds); then blocks up to
  // that.
  const bool keeps_blocks =
      ::mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1 || ::mallopt(M_MMAP_THRESHOLD, 32 << 20) == 1;
  return keeps_blocks && ::mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
#else
  return false;
#endif
}

}  // namespace cohort::core

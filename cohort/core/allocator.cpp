#include "cohort/core/allocator.h"

#include <malloc.h>

#include <climits>
#include <cstdlib>
#include <string_view>

namespace cohort::core {

bool tune_allocator() {
#ifdef __GLIBC__
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  if (tunables != nullptr && std::string_view(tunables).find("glibc.malloc.") != std::string_view::npos)
    return false;
  if (std::getenv("MALLOC_MMAP_THRESHOLD_") != nullptr) return false;
  return mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
#else
  return false;
#endif
}

}  // namespace cohort::core

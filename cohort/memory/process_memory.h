#pragma once

#include <cstdint>

namespace cohort::memory {

/// Memory of this process, in bytes; 0 where the kernel does not say.
struct ProcessMemory {
  std::int64_t rss_bytes = 0;
  std::int64_t pss_bytes = 0;  ///< shared pages count by their share
  std::int64_t peak_rss_bytes = 0;
};
ProcessMemory process_memory();
/// The first number of the above alone: a few microseconds.
std::int64_t resident_bytes();

struct SystemMemory {
  std::int64_t total_bytes = 0;
  std::int64_t available_bytes = 0;
};
SystemMemory system_memory();

}  // namespace cohort::memory

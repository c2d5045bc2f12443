#pragma once

#include <cstdint>

namespace cohort::memory {

/// Memory of this process, in bytes; 0 where the kernel does not say.
struct ProcessMemory {
  std::int64_t rss_bytes = 0;       ///< in physical memory now; shared pages count in full
  std::int64_t pss_bytes = 0;       ///< shared pages count by their share
  std::int64_t peak_rss_bytes = 0;  ///< most of rss_bytes since the process began
};
/// Reads all three from /proc/self. Differs in cost from resident_bytes(): the kernel walks the process's
/// mappings for the share.
ProcessMemory process_memory();
/// The first number of the above alone: a few microseconds.
std::int64_t resident_bytes();

/// Memory of the machine, in bytes; 0 where the kernel does not say.
struct SystemMemory {
  std::int64_t total_bytes = 0;
  std::int64_t available_bytes = 0;  ///< what new work can get without swapping, by the kernel's estimate
};
/// Reads both from /proc/meminfo, which does not know a container's limit.
SystemMemory system_memory();

}  // namespace cohort::memory

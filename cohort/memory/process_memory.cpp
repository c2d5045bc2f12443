#include "cohort/memory/process_memory.h"

#include <fstream>
#include <sstream>
#include <string>

namespace cohort::memory {
namespace {

/// Returns the value, in bytes, of the line `key:   N kB` of a file of /proc.
std::int64_t value_of(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key + ":")) continue;
    std::istringstream rest(line.substr(key.size() + 1));
    std::int64_t kib = 0;
    rest >> kib;
    return kib * 1024;
  }
  return 0;
}

}  // namespace

std::int64_t resident_bytes() {
  return value_of("/proc/self/status", "VmRSS");
}

ProcessMemory process_memory() {
  return {resident_bytes(), value_of("/proc/self/smaps_rollup", "Pss"),
          value_of("/proc/self/status", "VmHWM")};
}

SystemMemory system_memory() {
  return {value_of("/proc/meminfo", "MemTotal"), value_of("/proc/meminfo", "MemAvailable")};
}

}  // namespace cohort::memory

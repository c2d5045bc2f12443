#include "cohort/net/internal/host.h"

#include <filesystem>
#include <system_error>

#include "cohort/base/host.h"

namespace cohort::net {

std::string place_of_process() {
  std::error_code unknown;
  return base::machine_id() + " " + std::filesystem::read_symlink("/proc/self/ns/pid", unknown).string();
}

}  // namespace cohort::net

#pragma once

#include <filesystem>
#include <optional>
#include <string>

/// The share of time that the process's control groups grant it (containers, systemd slices, batch systems).
namespace cohort::base {

struct CgroupQuota {
  double cores = 0;    ///< cores' worth of time; 1.5 is three cores half of the time
  std::string source;  ///< the file that says so
};

/// Returns the tightest CPU quota among the process's cgroup and all above it, of version 1 or 2, or nothing
/// when there is none. `root` stands before /proc and /sys, for tests.
std::optional<CgroupQuota> cgroup_cpu_quota(const std::filesystem::path& root = "/");

}  // namespace cohort::base

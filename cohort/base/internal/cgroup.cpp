// /proc says where cgroups are mounted and in which cgroup this process is. From there the walk goes up to
// the mount point, as a limit anywhere above binds too, and the least quota counts. Versions 1 and 2 are both
// read. Always: what cannot be read sets no limit. In a container the path may be the host's, of which only a
// part can be seen.
#include "cohort/base/internal/cgroup.h"

#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

namespace cohort::base {
namespace {

namespace fs = std::filesystem;

struct Mount {
  bool unified = false;  // version 2
  std::string top;       // the cgroup that is mounted there: "/", or a container's own
  std::string point;     // where
};

bool lists(std::string_view list, std::string_view word) {
  std::istringstream words{std::string(list)};
  for (std::string item; std::getline(words, item, ',');) {
    if (item == word) return true;
  }
  return false;
}

// A line of /proc/self/mountinfo: id parent major:minor TOP POINT options [tag...] - TYPE source
// SUPER_OPTIONS
std::vector<Mount> cgroup_mounts(const fs::path& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root / "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string id, parent, device, top, point, word, type, source, options;
    words >> id >> parent >> device >> top >> point;
    while (words >> word && word != "-") {
    }
    words >> type >> source >> options;
    if (type == "cgroup2") mounts.push_back({true, top, point});
    if (type == "cgroup" && lists(options, "cpu")) mounts.push_back({false, top, point});
  }
  return mounts;
}

// A line of /proc/self/cgroup: 0::/path (version 2) or 4:cpu,cpuacct:/path (version 1).
std::optional<std::string> own_cgroup(const fs::path& root, bool unified) {
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (unified ? controllers.empty() : lists(controllers, "cpu")) return line.substr(second + 1);
  }
  return std::nullopt;
}

std::optional<double> read_v2(const fs::path& folder) {
  std::ifstream file(folder / "cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return std::nullopt;
  std::istringstream number(quota);
  double microseconds = 0;
  if (!(number >> microseconds) || microseconds <= 0) return std::nullopt;
  return microseconds / period;
}

std::optional<double> read_v1(const fs::path& folder) {
  std::ifstream quota_file(folder / "cpu.cfs_quota_us");
  std::ifstream period_file(folder / "cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

}  // namespace

std::optional<CgroupQuota> cgroup_cpu_quota(const fs::path& root) {
  std::optional<CgroupQuota> tightest;
  for (const Mount& mount : cgroup_mounts(root)) {
    const std::optional<std::string> own = own_cgroup(root, mount.unified);
    if (!own) continue;
    // In a container the path may be the host's, of which only the part below `top` can be seen here.
    fs::path below = fs::path(*own).relative_path();
    if (mount.top != "/") {
      const std::string inside = mount.top + "/";
      below = own->starts_with(inside) ? fs::path(own->substr(inside.size())) : fs::path();
    }
    const fs::path point = root / fs::path(mount.point).relative_path();
    // A limit anywhere above binds too.
    for (fs::path at = below;; at = at.parent_path()) {
      const fs::path folder = at.empty() ? point : point / at;
      const std::optional<double> cores = mount.unified ? read_v2(folder) : read_v1(folder);
      if (cores && (!tightest || *cores < tightest->cores)) {
        tightest = CgroupQuota{*cores, (folder / (mount.unified ? "cpu.max" : "cpu.cfs_quota_us")).string()};
      }
      if (at.empty()) break;
    }
  }
  return tightest;
}

}  // namespace cohort::base

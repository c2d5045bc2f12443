#include "cohort/core/cpu.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <sstream>

#include "cohort/core/error.h"

namespace cohort::core {
namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

int parse_id(std::string_view part, std::string_view whole) {
  int value = -1;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
  if (error != std::errc() || end != part.data() + part.size() || value < 0 || value >= CPU_SETSIZE) {
    throw UsageError("core.CpuSet", concat("\"", whole, "\" is not a set of cores"),
                     "ids and ranges, as in 0-3,8");
  }
  return value;
}

/// Cores granted by one cgroup folder, or 0 for no limit.
double folder_quota(const std::string& folder) {
  std::istringstream v2(read_text(folder + "/cpu.max"));
  std::string quota_text;
  double period = 0;
  if (v2 >> quota_text >> period && quota_text != "max" && period > 0)
    return std::atof(quota_text.c_str()) / period;
  const double quota = std::atof(read_text(folder + "/cpu.cfs_quota_us").c_str());
  period = std::atof(read_text(folder + "/cpu.cfs_period_us").c_str());
  return quota > 0 && period > 0 ? quota / period : 0;
}

}  // namespace

CpuSet::CpuSet(std::vector<int> ids) : ids_(std::move(ids)) {
  std::sort(ids_.begin(), ids_.end());
  ids_.erase(std::unique(ids_.begin(), ids_.end()), ids_.end());
}

CpuSet CpuSet::parse(std::string_view text) {
  std::vector<int> ids;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, end - begin);
    const std::size_t dash = part.find('-');
    const int first = parse_id(part.substr(0, dash), text);
    const int last = dash == std::string_view::npos ? first : parse_id(part.substr(dash + 1), text);
    if (last < first) {
      throw UsageError("core.CpuSet", concat("\"", text, "\": the range ", part, " runs backwards"),
                       "as in 0-3,8");
    }
    for (int id = first; id <= last; ++id) ids.push_back(id);
    begin = end + 1;
  }
  return CpuSet(std::move(ids));
}

CpuSet CpuSet::available() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::vector<int> ids;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) {
    for (int id = 0; id < CPU_SETSIZE; ++id) {
      if (CPU_ISSET(id, &mask)) ids.push_back(id);
    }
  }
  if (ids.empty()) ids.push_back(0);
  return CpuSet(std::move(ids));
}

std::string CpuSet::str() const {
  std::string text;
  for (std::size_t i = 0; i < ids_.size();) {
    std::size_t last = i;
    while (last + 1 < ids_.size() && ids_[last + 1] == ids_[last] + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(ids_[i]);
    if (last > i) text += "-" + std::to_string(ids_[last]);
    i = last + 1;
  }
  return text;
}

void CpuSet::pin_this_thread() const {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int id : ids_) CPU_SET(id, &mask);
  if (sched_setaffinity(0, sizeof mask, &mask) != 0) {
    throw SystemError("core.pin_this_thread", concat("cores ", str(), ": ", std::strerror(errno)),
                      concat("cores of this process: ", available().str()));
  }
}

double cgroup_cores(const std::string& root, const std::string& process_cgroups) {
  double cores = 0;
  const auto take = [&](const std::string& folder) {
    const double quota = folder_quota(folder);
    if (quota > 0) cores = cores == 0 ? quota : std::min(cores, quota);
  };
  std::istringstream lines(process_cgroups);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    // A limit of any folder above counts too.
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      take(root + (v2 ? "" : "/" + controllers) + path);
      take(root + (v2 ? "" : "/cpu") + path);
      if (path.find('/') == std::string::npos) break;
    }
  }
  return cores;
}

int usable_cores() {
  const double quota = cgroup_cores("/sys/fs/cgroup", read_text("/proc/self/cgroup"));
  const int available = CpuSet::available().size();
  return quota > 0 ? std::clamp(static_cast<int>(std::ceil(quota)), 1, available) : available;
}

}  // namespace cohort::core

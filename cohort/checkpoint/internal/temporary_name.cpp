// A name carries the host, the namespace of process ids with its boot, the process id, and the time of its
// start. Ids come again, so only the id together with the start time says whether the owner still runs. Of an
// owner in another place nothing is known, and the caller decides.
#include "cohort/checkpoint/internal/temporary_name.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>

#include "cohort/base/error.h"
#include "cohort/base/host.h"
#include "cohort/base/process.h"

namespace cohort::checkpoint {
namespace {

constexpr std::string_view kMark = ".cohort-";

/// The first half of the kernel's name for its time since boot, as a number: two hosts may have one name, and
/// the first process namespace has the same number everywhere.
std::string boot_number() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  uint64_t number = 0;
  file >> std::hex >> number;  // up to the dash
  return number == 0 ? "" : std::to_string(number);
}

/// `HOST-NAMESPACE`: processes with the same one see each other's process ids.
std::string place() {
  std::string host = base::host_name();
  std::replace(host.begin(), host.end(), '/', '_');
  std::error_code unknown;
  std::string space = std::filesystem::read_symlink("/proc/self/ns/pid", unknown).string();  // pid:[NUMBER]
  std::erase_if(space, [](char c) { return c < '0' || c > '9'; });
  return base::concat(host, "-", space.empty() ? "0" : space, boot_number());
}

/// Cuts the last `-NUMBER` off `text` and returns NUMBER; empty if `text` does not end like that.
std::string cut_number(std::string& text) {
  const size_t dash = text.rfind('-');
  if (dash == std::string::npos || dash + 1 == text.size() ||
      !std::all_of(text.begin() + static_cast<std::ptrdiff_t>(dash) + 1, text.end(),
                   [](char c) { return c >= '0' && c <= '9'; })) {
    return "";
  }
  const std::string number = text.substr(dash + 1);
  text.resize(dash);
  return number;
}

}  // namespace

std::string temporary_name(const std::string& name) {
  const std::string pid = std::to_string(::getpid());
  return base::concat(".", name, kMark, place(), "-", pid, "-", base::process_start(pid));
}

std::optional<TemporaryName> parse_temporary_name(const std::string& file_name) {
  const size_t mark = file_name.find(kMark, 2);
  if (mark == std::string::npos || file_name[0] != '.') {
    return std::nullopt;
  }
  std::string owner = file_name.substr(mark + kMark.size());
  const std::string start = cut_number(owner);
  const std::string pid = cut_number(owner);
  std::string host = owner;
  if (start.empty() || pid.empty() || cut_number(host).empty() || host.empty()) {
    return std::nullopt;
  }
  Owner state = Owner::kUnknown;
  if (owner == place()) {
    // A process id comes again (in a container it is always 1); together with the start time it does not.
    state = base::process_start(pid) == start ? Owner::kRuns : Owner::kEnded;
  }
  return TemporaryName{file_name.substr(1, mark - 1), state};
}

}  // namespace cohort::checkpoint

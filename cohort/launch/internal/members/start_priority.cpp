#include "cohort/launch/internal/members/start_priority.h"

#include <linux/capability.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/log.h"

namespace cohort::launch {
namespace {

constexpr int kLowerBy = 10, kLowest = 19;

int own_nice() {
  return ::getpriority(PRIO_PROCESS, 0);
}

// The kernel looks for the capability in the host's first user namespace alone.
bool is_in_first_user_namespace() {
  std::uint64_t inside = 1, outside = 1, count = 0;
  std::ifstream("/proc/self/uid_map") >> inside >> outside >> count;
  return inside == 0 && outside == 0 && count == UINT32_MAX;
}

bool has_nice_capability() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "CapEff:") continue;
    std::uint64_t capabilities = 0;
    status >> std::hex >> capabilities;
    return ((capabilities >> CAP_SYS_NICE) & 1U) != 0 && is_in_first_user_namespace();
  }
  return false;
}

}  // namespace

bool may_restore_priority() {
  rlimit limit{};
  const bool is_allowed =
      ::getrlimit(RLIMIT_NICE, &limit) == 0 && limit.rlim_cur >= static_cast<rlim_t>(20 - own_nice());
  return is_allowed || has_nice_capability();
}

// A call for a group is one for all of its threads; one for a process is for its first thread.
void lower_priority(pid_t group) {
  if (!may_restore_priority()) return;
  // One that has ended needs none.
  ::setpriority(PRIO_PGRP, static_cast<id_t>(group), std::min(own_nice() + kLowerBy, kLowest));
}

void restore_priority(pid_t group) {
  if (!may_restore_priority()) return;
  if (::setpriority(PRIO_PGRP, static_cast<id_t>(group), own_nice()) != 0 && errno != ESRCH) {
    base::log_warning(base::concat("process ", group, " keeps a low priority: ", std::strerror(errno)));
  }
}

}  // namespace cohort::launch

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "cohort/base/files/fd.h"

/// Where a process runs, and how its end is seen from another process of the same host.
namespace cohort::net {

/// Equal for processes that can see each other's process numbers: one boot of one machine, one network and one PID
/// namespace.
std::string place_of_process();

/// When a process began, in ticks since the boot; 0 where there is none of this number.
std::uint64_t begin_of(pid_t pid);

/// A descriptor that becomes readable when the process ends. Empty where there is no process of this number that began
/// then, or the kernel has no pidfd_open(2).
base::Fd watch_process(pid_t pid, std::uint64_t began);

}  // namespace cohort::net

#pragma once

#include <sys/types.h>

/// The priority of a process that starts while others make steps. No LibTorch. Not for users of the library.
namespace cohort::launch {

/// Whether this process may raise a priority that it has lowered: by RLIMIT_NICE, or by CAP_SYS_NICE.
bool may_restore_priority();
/// All threads of the process group have a lower priority (nice + 10) than this process. Nothing happens
/// where this process may not restore it.
void lower_priority(pid_t group);
/// All threads of the process group have the priority of this process, if lower_priority() has changed it.
void restore_priority(pid_t group);

}  // namespace cohort::launch

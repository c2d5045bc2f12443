#pragma once

#include <sys/types.h>

#include <string>

#include "cohort/base/files/fd.h"

/// Other processes of this host, and the signals that they get. No LibTorch.
namespace cohort::base {

/// Returns when process `pid` started, in clock ticks since boot; empty if there is no such process. Numbers
/// of processes come again; a number together with this does not.
std::string process_start(const std::string& pid);

/// Returns a descriptor that becomes readable when the process ends (pidfd_open(2)); one that is not open
/// where there is no such process, or the kernel has no such call.
Fd open_process(pid_t pid);

/// Returns "signal 15 (Terminated)".
std::string describe_signal(int number);

}  // namespace cohort::base

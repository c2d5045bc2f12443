#pragma once

#include <sys/types.h>

#include <filesystem>
#include <vector>

#include "cohort/base/cpu.h"

namespace cohort::launch {

/// Deals `allowed` out to `num_ranks` ranks: neighbours by socket and core, so that the two threads of one
/// core go to the same rank, and shares that differ by one at most. With more ranks than cores rank r gets
/// the (r modulo cores)-th. `root` stands before /sys, for tests.
std::vector<base::CpuSet> split_cores(const base::CpuSet& allowed, int num_ranks,
                                      const std::filesystem::path& root = "/");

/// Lets all threads of a process run on these cores only, as far as the system allows it.
void bind_process(pid_t process, const base::CpuSet& cpus);

}  // namespace cohort::launch

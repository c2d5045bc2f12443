#pragma once

#include <filesystem>
#include <vector>

#include "cohort/core/cpu.h"

namespace cohort::launch {

/// Deals `allowed` out to `num_ranks` ranks: neighbours by socket and core, so that the two threads of one
/// core go to the same rank, and shares that differ by one at most. With more ranks than cores rank r gets
/// the (r modulo cores)-th. `root` stands before /sys, for tests.
std::vector<core::CpuSet> split_cores(const core::CpuSet& allowed, int num_ranks,
                                      const std::filesystem::path& root = "/");

}  // namespace cohort::launch

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cohort/base/cpu.h"

/// Where a part of the work runs: a device, and for the CPU the cores of it.
///
///     cpu          every core that the process may use
///     cpu:0        the first of them
///     cpu:2-3      the third and fourth
///     cpu:0,2      the first and third
///     cpu:0/a      the first again, as a place of its own: two workers share a core as cpu:0/a and cpu:0/b
///     cuda:3       GPU 3 (cuda alone is GPU 0)
///
/// cpu:K is the K-th core that this process may use, not core K of the machine, so one placement works in a
/// container and under a batch system alike.
namespace cohort::base {

/// A place where a part of the work runs; parse() reads the notation above.
struct Placement {
  std::string device = "cpu";  ///< "cpu" or "cuda:K", as LibTorch writes it
  CpuSet cpus;                 ///< the machine's cores; for a GPU, where its host thread may run
  std::string name = "cpu";    ///< canonical text: equal names are the same place

  /// Throws: ConfigError that shows the notation, or says which cores there are.
  static Placement parse(std::string_view text) { return parse(text, CpuSet::of_process()); }
  /// As above, with the cores that the process may use given.
  static Placement parse(std::string_view text, const CpuSet& allowed);

  bool is_cpu() const { return device == "cpu"; }
  bool operator==(const Placement& other) const { return name == other.name; }
};

/// Reads placements with commas or spaces between: "cpu:0,cpu:1". A comma before a number continues with the
/// cores of the placement that it stands in: "cpu:0,1,cpu:2" is two placements.
std::vector<Placement> parse_placements(std::string_view text, const CpuSet& allowed = CpuSet::of_process());

}  // namespace cohort::base

#include "cohort/launch/internal/cpu_affinity.h"

#include <algorithm>
#include <fstream>
#include <tuple>

#include "cohort/base/error.h"

namespace cohort::launch {

std::vector<base::CpuSet> split_cores(const base::CpuSet& allowed, int num_ranks,
                                      const std::filesystem::path& root) {
  // Socket, core, number; where the system says nothing, the order of the numbers.
  std::vector<std::tuple<int, int, int>> cpus;
  for (const int id : allowed.ids()) {
    const auto folder = root / base::concat("sys/devices/system/cpu/cpu", id, "/topology");
    int socket = 0, core = id;
    std::ifstream(folder / "physical_package_id") >> socket;
    if (std::ifstream file(folder / "core_id"); !(file >> core)) core = id;
    cpus.emplace_back(socket, core, id);
  }
  // So each rank's cores lie together: on one socket, and both threads of a core.
  std::sort(cpus.begin(), cpus.end());
  const auto num_cpus = cpus.size();
  const auto ranks = static_cast<std::size_t>(num_ranks);
  std::vector<base::CpuSet> shares;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    std::vector<int> ids;
    if (ranks >= num_cpus) {
      // More ranks than cores: they take turns, a core each.
      if (num_cpus > 0) ids.push_back(std::get<2>(cpus[rank % num_cpus]));
    } else {
      // Shares differ by one core at most, and leave none out.
      for (std::size_t i = rank * num_cpus / ranks; i < (rank + 1) * num_cpus / ranks; ++i) {
        ids.push_back(std::get<2>(cpus[i]));
      }
    }
    shares.emplace_back(std::move(ids));
  }
  return shares;
}

}  // namespace cohort::launch

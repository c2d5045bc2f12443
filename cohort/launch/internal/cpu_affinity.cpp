#include "cohort/launch/internal/cpu_affinity.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
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

void bind_process(pid_t process, const base::CpuSet& cpus) {
  const int count = cpus.ids().back() + 1;
  const std::size_t num_bytes = CPU_ALLOC_SIZE(count);
  std::vector<unsigned long> bits(num_bytes / sizeof(unsigned long));
  auto* const mask = reinterpret_cast<cpu_set_t*>(bits.data());
  for (const int id : cpus.ids()) CPU_SET_S(id, num_bytes, mask);
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator(base::concat("/proc/", process, "/task"), ignored)) {
    // A thread that starts meanwhile inherits from one that is bound already, or will be.
    const pid_t thread = static_cast<pid_t>(std::strtol(entry.path().filename().c_str(), nullptr, 10));
    ::sched_setaffinity(thread, num_bytes, mask);
  }
}

}  // namespace cohort::launch

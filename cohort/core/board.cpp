#include "cohort/core/board.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace cohort::core {

std::vector<int> missing_ranks(Board& board, const std::string& prefix, int size, Deadline deadline) {
  using std::chrono::milliseconds;
  std::vector<int> missing;
  for (int rank = 0; rank < size; ++rank) missing.push_back(rank);
  for (milliseconds pause(1);; pause = std::min(pause * 2, milliseconds(10))) {
    std::erase_if(missing, [&](int rank) { return board.has(prefix + "/" + std::to_string(rank)); });
    if (missing.empty() || deadline.expired()) return missing;
    std::this_thread::sleep_for(std::min<Deadline::Clock::duration>(pause, deadline.remaining()));
  }
}

}  // namespace cohort::core

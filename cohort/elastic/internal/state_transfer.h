#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cohort/elastic/internal/process_inbox.h"
#include "cohort/elastic/session.h"

/// The state of a process that has the newest one, for those that lack it.
namespace cohort::elastic {

/// Between which processes, and how.
struct TransferPlace {
  std::uint64_t generation = 0;
  int process = 0;
  std::vector<int> holders, behind;  ///< processes that have the newest state, and that lack it
  std::uint64_t chunk_bytes = std::uint64_t{4} << 20;
  std::chrono::milliseconds timeout{};  ///< of each wait: a copy that gets on may take as long as it takes
  /// Called with each number of bytes that were given or got; may be null.
  std::function<void(std::uint64_t bytes)> on_bytes = {};
};

/// XXH3 of a state, its text and the tensors' sizes included.
std::uint64_t hash_of(const StateSnapshot& state);

/// Gives the state to all that lack it. Blocks until each has it. Throws: as ProcessInbox::wait().
void serve_state(ProcessInbox& inbox, const TransferPlace& place, const StateSnapshot& state);

struct PulledState {
  StateSnapshot state;
  std::uint64_t bytes = 0;
};
/// Gets the state, from all that have it at once. Chunks go to the tensors of `own`, if these are as the
/// other process's, and to new ones else: `before_writing` is called first. Throws: as ProcessInbox::wait();
/// CommError where processes that have the state have different ones, and for bytes that are wrong three
/// times.
PulledState pull_state(ProcessInbox& inbox, const TransferPlace& place, const StateSnapshot& own,
                       const std::function<void()>& before_writing);
/// Tells all that gave it that this process has the state.
void confirm_state(ProcessInbox& inbox, const TransferPlace& place);

}  // namespace cohort::elastic

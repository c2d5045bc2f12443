#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cohort/membership/generation.h"

namespace cohort::membership {

/// What an agent says of itself and its ranks.
struct MemberStatus {
  std::string store;      ///< address of a key-value store that it offers for a generation
  int num_processes = 1;  ///< ranks that it starts
  bool is_ready = true;   ///< it can enter a generation at once. Until then it waits, and nobody waits for it
  std::uint64_t entered = 0;  ///< number of the generation that its ranks are in, or were in last
  /// Number of the last generation in which its ranks have begun a step: they have the state.
  std::uint64_t recovered = 0;
  std::uint64_t committed_steps = 0;  ///< by its ranks so far, also by those that died
  bool is_leaving = false;            ///< it was given notice: it leaves between two steps
  /// All its ranks have made the last step; they stay until the run has ended, so that another one can have
  /// their state. Of a program without virtual ranks: they have ended, with status 0.
  bool is_finished = false;
  int stop_signal = 0;  ///< of `is_finished`: the signal by which its ranks have ended before the last step
  bool is_state_lost = false;  ///< of `entered`: no process has the newest state
  std::string failure;         ///< of `entered`: how a rank ended; empty: none has failed
  int exit_status = 0;         ///< of the rank that has failed
  bool ends_run = false;  ///< its ranks fail again and again: the run continues without this agent, or ends
  std::string stuck;  ///< a rank that does not enter generations, so nobody waits for this agent; empty: none
  std::vector<MemberId> lost_links;  ///< of `entered`: members to which a rank has lost its link

  bool operator==(const MemberStatus&) const = default;
};

}  // namespace cohort::membership

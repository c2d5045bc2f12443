#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/membership/generation.h"
#include "cohort/membership/run_settings.h"

/// What the agents of a run keep together.
namespace cohort::membership {

/// How a run stands.
enum class RunState {
  kForming,  ///< fewer than min_nodes agents are there: no step is made
  kRunning,
  kSucceeded,
  kFailed,
  kStopped,  ///< its ranks have saved and ended before the last step, as a signal asked for it
};

/// An agent that was dropped, and may have the newest state.
struct AwaitedAgent {
  std::string incarnation;
  std::uint64_t committed_steps = 0;  ///< by its ranks, at most

  bool operator==(const AwaitedAgent&) const = default;
};

/// All that agents agree on. Changed by compare-and-swap only.
struct RendezvousRecord {
  RunSettings settings;
  /// Incarnation of the agent that wrote the first record of the run: another run has another one. Of an
  /// embedded record: of the agent that has it.
  std::string origin;
  RunState state = RunState::kForming;
  Generation generation;            ///< the newest
  std::vector<MemberInfo> waiting;  ///< by id: they enter as soon as they can
  std::vector<MemberInfo> spares;   ///< by id: they enter where a member is gone
  /// Agents that had the state when they were last heard: members of the first generation, and who has begun
  /// a step since it entered. A generation has one of them.
  std::vector<MemberId> holders;
  /// Since no member had the state any more, until one has it again: by incarnation, for whom the run waits.
  /// Whoever decides next may know nothing of them.
  std::vector<AwaitedAgent> awaited;
  MemberId next_id = 1;  ///< of the next agent that joins
  int restarts_used = 0;
  bool was_link_lost = false;  ///< the newest generation was made since two members lost their link
  std::string end_cause;       ///< why the run has ended, or is forming again
  /// Of the rank whose failure has ended the run, or made it form again; 0: none has. Of kStopped: 128 + the
  /// signal.
  int exit_status = 0;

  bool has_ended() const { return state != RunState::kForming && state != RunState::kRunning; }
  /// The signal of kStopped; else 0.
  int stop_signal() const { return state == RunState::kStopped ? exit_status - 128 : 0; }
  /// The agent of this incarnation: a member, a spare or one that waits; else nullptr.
  const MemberInfo* find(std::string_view incarnation) const;

  bool operator==(const RendezvousRecord&) const = default;
};

/// The record as a text, which says its version.
std::string to_text(const RendezvousRecord& record);
/// Reads what to_text() wrote. Throws: CommError for another version, a missing or unknown field, and a value
/// out of its range.
RendezvousRecord parse_record(std::string_view text);

}  // namespace cohort::membership

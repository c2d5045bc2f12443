#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <string>

#include "cohort/membership/internal/agent_message.h"

namespace cohort::membership {

/// Time on a clock that whoever drives the protocol reads.
using Time = std::chrono::steady_clock::time_point;

/// An agent as another one sees it.
struct AgentView {
  std::string address;  ///< empty: it has not reported
  Report report;        ///< the last
  Time first_heard, last_heard;
  bool is_dead = false;  ///< its process has ended
  Time link_lost_at;     ///< when its report first had lost links
  Time hopeless_at;      ///< when its report first had ends_run
  Time may_join;         ///< it was dropped, and is not taken again before
  int num_drops = 0;
  std::uint64_t revision = 0;        ///< of the record that it has
  std::uint64_t place_revision = 0;  ///< of the record that gave it another place, as one of a spare
  std::uint64_t most_steps = 0;      ///< committed, by all its reports: a rank that dies may lose them

  /// This is its last report now.
  void note(const Report& next, Time now) {
    const bool is_first = report.lost_links.empty() || report.entered != next.entered;
    if (!next.lost_links.empty() && is_first) link_lost_at = now;
    if (next.ends_run && (!report.ends_run || report.entered != next.entered)) hopeless_at = now;
    most_steps = std::max(most_steps, next.committed_steps);
    report = next;
  }
  /// It is no member any more. Who had the state has made these steps, also if it never reported to this
  /// agent: it may have decided itself.
  void note_drop(Time now, Time::duration pause, std::uint64_t steps) {
    may_join = now + pause * (1 << std::min(num_drops++, 3));
    most_steps = std::max(most_steps, steps);
    if (last_heard == Time()) last_heard = now;
  }
  /// Nobody asks for it any more, if it is not in the record. The run may wait for one that had the state.
  bool is_past(Time now, const RunSettings& settings) const {
    const auto most =
        std::max(100 * settings.silence, most_steps > 0 ? settings.join_timeout : settings.silence);
    return now > may_join && now - last_heard > most;
  }
};

/// What the agent that decides has seen.
struct Observations {
  Time now;
  std::string self;                         ///< its own incarnation
  std::map<std::string, AgentView> agents;  ///< by incarnation; its own too
  Time since;                               ///< when it began to decide, or was stopped itself and ran again
  Time state_since;                         ///< when it saw the state of the run first
  Time generation_since;  ///< when it saw the newest generation first, or began to decide later
  Time decides_since;  ///< when it began to decide; the time for which it was stopped itself does not count
  /// It made the newest generation, and has decided since: members of it have reported to it alone.
  bool made_generation = false;

  /// Null: that agent has not reported.
  const AgentView* find(const std::string& incarnation) const {
    const auto found = agents.find(incarnation);
    return found == agents.end() ? nullptr : &found->second;
  }
};

}  // namespace cohort::membership

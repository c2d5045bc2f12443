#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "cohort/membership/internal/heard_agents.h"
#include "cohort/membership/internal/observations.h"
#include "cohort/membership/record.h"

namespace cohort::membership {

/// What an agent keeps of the others for the time in which it decides: Observations::agents.
using AgentViews = std::map<std::string, AgentView>;

/// Who begins to wait, or to be a spare, or ends it, is to have the record of this revision; also one that
/// waits, and begins to have the state or ends it. Others hear of their place with a generation.
void note_places(AgentViews& views, const RendezvousRecord& before, const RendezvousRecord& next,
                 std::uint64_t revision);

/// Agents of the record whose processes have ended are dead. The one that decided before has reported to
/// nobody, so nobody has a view of it yet.
void note_deaths(AgentViews& views, const RendezvousRecord& record, const HeardAgents& heard);

}  // namespace cohort::membership

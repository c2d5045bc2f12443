#pragma once

#include "cohort/launch/internal/agent_output.h"
#include "cohort/launch/internal/members/member_link.h"

namespace cohort::launch {

/// Returns the job's status after the run is over for this agent: 0, or that of the rank whose failure has
/// ended it. Says why in the log. Not for users of the library. Throws: RendezvousError where no rank is the
/// cause.
int status_of_end(const MemberLink& member, AgentOutput& output);

}  // namespace cohort::launch

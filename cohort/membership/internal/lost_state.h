#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/membership/internal/observations.h"
#include "cohort/membership/record.h"

namespace cohort::membership {

inline bool is_in(const std::vector<MemberId>& ids, MemberId id) {
  return std::ranges::find(ids, id) != ids.end();
}
/// Who has said so has the state, also where the record does not say it yet. Once all members have it nobody
/// is awaited any more.
void note_holders(const RendezvousRecord& record, const Observations& seen, RendezvousRecord& next);
/// Those of them that wait by another id, as they were dropped as silent: the newest generation makes no step
/// without them either. Where that generation has made none, its steps are those of the one before.
void note_returned_holders(const RendezvousRecord& record, const Observations& seen, RendezvousRecord& next);
/// Others are none any more.
void keep_holders(std::vector<MemberId>& holders, const std::vector<MemberInfo>& members);

/// Whether a generation of these makes steps (lost_state.cpp, Note [Who has the state]). An agent that has
/// begun to decide waits until such a member has reported: it says how many steps are committed, and the
/// record may have been written long before.
bool may_make_steps(const RendezvousRecord& record, const Observations& seen,
                    const std::vector<MemberId>& holders, const std::vector<MemberInfo>& members);

/// Whether a holder's ranks surely have the state: all of them have begun a step of the newest generation,
/// and none has failed since. A rank that died within a step has none, and its agent is a holder all the
/// same.
bool has_state_now(const RendezvousRecord& record, const Observations& seen,
                   const std::vector<MemberId>& holders, const MemberInfo& member);
/// While the run forms. One that leaves with the state waits until another one has it that stays, as long as
/// it is ready to give it.
void let_leavers_go(const RendezvousRecord& record, const Observations& seen, RendezvousRecord& next);

/// The most steps that any agent has said to be committed.
std::uint64_t newest_steps(const RendezvousRecord& record, const Observations& seen);

/// Whether the ranks of an agent may have the newest state, by the steps that it has reported. Only a
/// generation shows whether they do: what an agent reports stays where its ranks have lost their state.
bool may_have_state(const RendezvousRecord& record, const Observations& seen, const std::string& incarnation);
/// Those of whom this is so.
std::vector<MemberId> may_have_state(const RendezvousRecord& record, const Observations& seen,
                                     const std::vector<MemberInfo>& agents);

/// Returns whom the record is to await: of all agents those, and of those that it awaits the ones of which
/// this agent knows nothing.
std::vector<AwaitedAgent> awaited_agents(const RendezvousRecord& record, const Observations& seen);

/// Whether there may be such an agent, of which the one that decides knows, or may hear soon.
bool may_state_come_back(const RendezvousRecord& record, const Observations& seen);

}  // namespace cohort::membership

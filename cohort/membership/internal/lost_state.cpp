// Note [Who has the state]: a generation of which all members are on one side of a cut network makes steps
// there, whatever the other side decides. So a generation without an agent that has the state must not be
// made: what it would do, another one may be doing. A member has the state from its first step on, as long as
// it stays a member: no generation that it is in can make a step without it. While no such member is heard
// nothing is decided, for join_timeout at most. One that leaves by notice stays a member until another one
// has the state: a planned generation lets those in that get it.
//
// Note [Lost states]: where all that had the state are dead, or say that it is lost, no generation makes a
// step any more. An agent that was dropped as silent may have the state all the same, and come back. So the
// run forms again. A generation that loses its state has a holder, whose agent knows what its ranks had
// committed, and says so. Where all holders are dead there may be nobody who does: an agent that begins to
// decide then does not know how many steps were made, and must not let an agent continue that was dropped
// long before. A member of the generation knows it but for one step, as each step needs all members. Whoever
// lets the run form knew it. So the record names those that may have the state: another agent that decides
// later waits for them, and takes them, whether it knows how many steps were made or not.
#include "cohort/membership/internal/lost_state.h"

#include <algorithm>

#include "cohort/membership/internal/seen_members.h"

namespace cohort::membership {
namespace {

// One process of the generation says so for all of them.
bool is_lost(const RendezvousRecord& record, const Observations& seen) {
  return std::ranges::any_of(record.generation.members, [&](const MemberInfo& member) {
    const Report* const report = SeenMembers(record, seen).report_of_generation(member);
    return report != nullptr && report->is_state_lost;
  });
}

// Processes of one generation may differ: one whose agent knows of more steps misses a state with them, where
// another one begins a step.
bool have_all_recovered(const RendezvousRecord& record, const Observations& seen) {
  return std::ranges::all_of(record.generation.members, [&](const MemberInfo& member) {
    const Report* const report = SeenMembers(record, seen).report_of_generation(member);
    return report != nullptr && !report->is_state_lost && report->recovered == record.generation.number;
  });
}

bool knows_steps(const RendezvousRecord& record, const Observations& seen) {
  return seen.made_generation ||
         std::ranges::any_of(record.generation.members, [&](const MemberInfo& member) {
           return SeenMembers(record, seen).report_of_generation(member) != nullptr;
         });
}

// Null: the record does not await it.
const AwaitedAgent* find_awaited(const RendezvousRecord& record, const std::string& incarnation) {
  const auto found = std::ranges::find(record.awaited, incarnation, &AwaitedAgent::incarnation);
  return found == record.awaited.end() ? nullptr : &*found;
}

// A view without an address is of an agent that was dropped, and has not reported to this one.
bool is_known(const Observations& seen, const std::string& incarnation) {
  const AgentView* const agent = seen.find(incarnation);
  return agent != nullptr && (agent->is_dead || !agent->address.empty());
}

// The deciding agent of before may know of more steps than this one.
std::uint64_t most_steps_of(const RendezvousRecord& record, const Observations& seen,
                            const std::string& incarnation) {
  const AgentView* const agent = seen.find(incarnation);
  const AwaitedAgent* const awaited = find_awaited(record, incarnation);
  return std::max(agent == nullptr ? 0 : agent->most_steps,
                  awaited == nullptr ? 0 : awaited->committed_steps);
}

// Those of which this agent knows are asked for by what it knows.
bool waits_for_unknown(const RendezvousRecord& record, const Observations& seen) {
  // While the run forms. A generation that loses the state has not waited for anybody.
  const bool is_forming = record.state == RunState::kForming;
  if (is_forming && seen.now - seen.state_since > record.settings.join_timeout) return false;
  return std::ranges::any_of(record.awaited, [&](const AwaitedAgent& agent) {
    return !is_known(seen, agent.incarnation) &&
           most_steps_of(record, seen, agent.incarnation) + 1 >= newest_steps(record, seen);
  });
}

// An agent that hears nobody who had the state does not know whom the one that wrote the record waits for. A
// member of the newest generation may say it, while one lives.
bool waits_for_others(const RendezvousRecord& record, const Observations& seen) {
  const auto is_dead = [&](const MemberInfo& member) { return SeenMembers(record, seen).is_dead(member); };
  return record.state == RunState::kForming && record.holders.empty() &&
         !std::ranges::all_of(record.generation.members, is_dead) &&
         std::ranges::none_of(seen.agents, [&](const auto& entry) {
           const std::uint64_t steps = entry.second.most_steps;
           return steps > 0 && steps + 1 >= record.generation.committed_steps;
         });
}

// Also one that is stuck, as it may get on.
bool may_be_awaited(const RendezvousRecord& record, const Observations& seen,
                    const std::string& incarnation) {
  const AgentView* const agent = seen.find(incarnation);
  const std::uint64_t steps = most_steps_of(record, seen, incarnation);
  if (agent == nullptr || agent->is_dead || steps == 0) return false;
  const Report& report = agent->report;
  if (report.is_leaving || report.is_state_lost || report.ends_run) return false;
  const bool was_member = std::ranges::find(record.generation.members, incarnation,
                                            &MemberInfo::incarnation) != record.generation.members.end();
  const bool may_ask = find_awaited(record, incarnation) != nullptr || knows_steps(record, seen);
  if (was_member ? is_lost(record, seen) : !may_ask) return false;
  return steps + 1 >= newest_steps(record, seen);  // as Recovery takes it
}

}  // namespace

void note_holders(const RendezvousRecord& record, const Observations& seen, RendezvousRecord& next) {
  for (const MemberInfo& member : record.generation.members) {
    const AgentView* const agent = seen.find(member.incarnation);
    const bool has_recovered = agent != nullptr && agent->report.recovered == record.generation.number;
    if (has_recovered && !is_in(next.holders, member.id)) next.holders.push_back(member.id);
  }
  std::ranges::sort(next.holders);
  if (record.state == RunState::kRunning && have_all_recovered(record, seen)) next.awaited.clear();
}

void note_returned_holders(const RendezvousRecord& record, const Observations& seen, RendezvousRecord& next) {
  for (const MemberInfo& agent : next.waiting) {
    const AgentView* const known = seen.find(agent.incarnation);
    const bool was_member = std::ranges::any_of(record.generation.members, [&](const MemberInfo& member) {
      return member.incarnation == agent.incarnation && member.id != agent.id;
    });
    if (!was_member || known == nullptr || known->report.ends_run || is_in(next.holders, agent.id)) continue;
    const bool has_recovered = known->report.recovered == record.generation.number;
    if (has_recovered || may_have_state(record, seen, agent.incarnation)) next.holders.push_back(agent.id);
  }
}

void keep_holders(std::vector<MemberId>& holders, const std::vector<MemberInfo>& members) {
  std::erase_if(
      holders, [&](MemberId id) { return std::ranges::find(members, id, &MemberInfo::id) == members.end(); });
}

bool may_make_steps(const RendezvousRecord& record, const Observations& seen,
                    const std::vector<MemberId>& holders, const std::vector<MemberInfo>& members) {
  if (record.settings.virtual_ranks == 0 || record.generation.number == 0) return true;
  return std::ranges::any_of(members, [&](const MemberInfo& member) {
    return is_in(holders, member.id) && seen.find(member.incarnation) != nullptr;
  });
}

bool has_state_now(const RendezvousRecord& record, const Observations& seen,
                   const std::vector<MemberId>& holders, const MemberInfo& member) {
  const AgentView* const agent = seen.find(member.incarnation);
  return is_in(holders, member.id) && agent != nullptr && agent->report.failure.empty() &&
         agent->report.recovered == record.generation.number;
}

void let_leavers_go(const RendezvousRecord& record, const Observations& seen, RendezvousRecord& next) {
  const SeenMembers agents(record, seen);
  const auto stays = [&](const MemberInfo& member) { return !agents.is_leaving(member); };
  const auto may_give_state = [&](const MemberInfo& member) {
    return stays(member) && !agents.is_silent(member, 1) &&
           has_state_now(record, seen, next.holders, member) && agents.view(member)->report.is_ready;
  };
  // One whose time to leave is over is not ready any more.
  const auto waits = [&](const MemberInfo& member) {
    return stays(member) || (is_in(next.holders, member.id) && agents.view(member)->report.is_ready &&
                             !agents.is_silent(member, kAloneFactor));
  };
  if (!agents.is_elastic() || std::ranges::any_of(next.waiting, may_give_state) ||
      std::ranges::none_of(next.waiting, waits)) {
    std::erase_if(next.waiting, [&](const MemberInfo& member) { return !stays(member); });
    keep_holders(next.holders, next.waiting);
  }
}

std::uint64_t newest_steps(const RendezvousRecord& record, const Observations& seen) {
  std::uint64_t steps = record.generation.committed_steps;
  for (const auto& [incarnation, agent] : seen.agents) steps = std::max(steps, agent.most_steps);
  return steps;
}

bool may_have_state(const RendezvousRecord& record, const Observations& seen,
                    const std::string& incarnation) {
  const AgentView* const agent = seen.find(incarnation);
  return may_be_awaited(record, seen, incarnation) && agent->report.stuck.empty();
}

std::vector<MemberId> may_have_state(const RendezvousRecord& record, const Observations& seen,
                                     const std::vector<MemberInfo>& agents) {
  std::vector<MemberId> ids;
  for (const MemberInfo& agent : agents) {
    if (may_have_state(record, seen, agent.incarnation)) ids.push_back(agent.id);
  }
  return ids;
}

std::vector<AwaitedAgent> awaited_agents(const RendezvousRecord& record, const Observations& seen) {
  std::vector<AwaitedAgent> agents;
  for (const AwaitedAgent& agent : record.awaited) {
    if (!is_known(seen, agent.incarnation)) agents.push_back(agent);
  }
  for (const auto& [incarnation, agent] : seen.agents) {
    const bool is_new = std::ranges::find(agents, incarnation, &AwaitedAgent::incarnation) == agents.end();
    if (is_new && may_be_awaited(record, seen, incarnation))
      agents.push_back({incarnation, most_steps_of(record, seen, incarnation)});
  }
  std::ranges::sort(agents, {}, &AwaitedAgent::incarnation);
  return agents;
}

bool may_state_come_back(const RendezvousRecord& record, const Observations& seen) {
  // It was another one that dropped an agent: this one hears of it by its next report.
  const bool is_new = seen.now - seen.decides_since <= kAloneFactor * record.settings.silence;
  if (is_new || waits_for_others(record, seen) || waits_for_unknown(record, seen)) return true;
  return std::ranges::any_of(seen.agents, [&](const auto& entry) {
    return seen.now - entry.second.last_heard <= record.settings.join_timeout &&
           may_have_state(record, seen, entry.first);
  });
}

}  // namespace cohort::membership

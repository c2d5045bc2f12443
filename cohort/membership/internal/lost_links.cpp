// Note [Lost links]: ranks do not reach each other, though the agent that decides hears both agents for
// another `silence`: a link is also lost where the other side has died. Where `silence` is long, kLinkTime is
// enough once both have been heard after the loss. The first answer is another generation with the same
// members, whose links are new. If a link is lost again before a step was made:
//   of two members one is dropped. One that has the state stays. Then one stays whose ranks have all entered,
//     and one that fewer members have lost: a rank that hangs is lost by all others, also by those of its own
//     agent. Then the earlier one stays;
//   within a member its agent ends a rank, which is a failure. Until it has, another generation would be in
//     vain: the next one comes after kAloneFactor times `silence`.
#include "cohort/membership/internal/lost_links.h"

#include <algorithm>

#include "cohort/membership/internal/lost_state.h"
#include "cohort/membership/internal/seen_members.h"

namespace cohort::membership {
namespace {

// In which an agent that lives says that a rank of it has died.
constexpr std::chrono::milliseconds kLinkTime(500);

}  // namespace

std::optional<LostLink> find_lost_link(const RendezvousRecord& record, const Observations& seen,
                                       const std::set<MemberId>& gone, std::uint64_t newest_steps) {
  const SeenMembers members(record, seen);
  const auto& silence = record.settings.silence;
  const bool is_repeated = record.was_link_lost && newest_steps <= record.generation.committed_steps;
  const auto has_said_since = [&](const MemberInfo& member, Time lost_at) {
    const AgentView* const agent = members.view(member);
    return members.is_self(member) || (agent != nullptr && agent->last_heard > lost_at + kLinkTime);
  };
  // The next generation is without a member that gives up: nobody is dropped for its links.
  const auto is_out = [&](const MemberInfo& member) {
    return gone.contains(member.id) || members.is_hopeless(member);
  };
  std::optional<LostLink> within;
  for (const MemberInfo& member : record.generation.members) {
    const Report* const report = members.report_of_generation(member);
    if (report == nullptr || is_out(member)) continue;
    const Time lost_at = members.view(member)->link_lost_at;
    const Time::duration lost_for = seen.now - lost_at;
    if (lost_for <= std::min(silence, kLinkTime)) continue;
    for (const MemberId id : report->lost_links) {
      const MemberInfo* const other = record.generation.find(id);
      if (other == nullptr || is_out(*other)) continue;
      if (lost_for <= silence && !(has_said_since(member, lost_at) && has_said_since(*other, lost_at)))
        continue;
      if (other != &member) return LostLink{&member, other, is_repeated};
      if (!is_repeated || lost_for > kAloneFactor * silence) within = LostLink{&member, &member, is_repeated};
    }
  }
  return within;
}

MemberId member_to_drop(const RendezvousRecord& record, const Observations& seen, const LostLink& lost) {
  const SeenMembers members(record, seen);
  const MemberInfo &first = *lost.first, &second = *lost.second;
  const bool is_first_holder = is_in(record.holders, first.id);
  if (is_first_holder != is_in(record.holders, second.id)) return is_first_holder ? second.id : first.id;
  if (members.report_of_generation(second) == nullptr) return second.id;
  const auto num_losers = [&](const MemberInfo& of) {
    return std::ranges::count_if(record.generation.members, [&](const MemberInfo& member) {
      const Report* const report = members.report_of_generation(member);
      return report != nullptr && is_in(report->lost_links, of.id);
    });
  };
  const auto lost_first = num_losers(first), lost_second = num_losers(second);
  if (lost_first != lost_second) return lost_first > lost_second ? first.id : second.id;
  const MemberId later = std::max(first.id, second.id);
  const MemberInfo* const self = record.find(seen.self);
  return self != nullptr && later == self->id ? std::min(first.id, second.id) : later;
}

}  // namespace cohort::membership

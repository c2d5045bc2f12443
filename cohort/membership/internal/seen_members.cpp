#include "cohort/membership/internal/seen_members.h"

namespace cohort::membership {

std::set<MemberId> SeenMembers::gone_members() const {
  const std::vector<MemberInfo>& members = old_.generation.members;
  std::set<MemberId> gone, heard;
  for (const MemberInfo& member : members) {
    if (!is_dead(member) && !is_silent(member, 1)) heard.insert(member.id);
  }
  std::set<MemberId> seen_silent;  // by a second observer
  for (const MemberInfo& member : members) {
    const AgentView* const agent = view(member);
    if (heard.count(member.id) == 0 || agent == nullptr || is_self(member)) continue;
    seen_silent.insert(agent->report.unheard.begin(), agent->report.unheard.end());
  }
  const MemberInfo* const self_info = old_.find(seen_.self);
  const MemberId self = self_info == nullptr ? 0 : self_info->id;
  const bool has_observer = std::any_of(heard.begin(), heard.end(), [&](MemberId id) { return id != self; });
  const bool is_minority = 2 * heard.size() < members.size();
  for (const MemberInfo& member : members) {
    if (is_self(member)) continue;
    const AgentView* const agent = view(member);
    const bool is_deaf = agent != nullptr && agent->report.known < old_.generation.number &&
                         seen_.now - seen_.generation_since > kAloneFactor * old_.settings.silence;
    const bool is_agreed = !has_observer || seen_silent.count(member.id) > 0;
    if (is_dead(member) || is_silent(member, kAloneFactor) || is_deaf ||
        (is_silent(member, 1) && is_agreed && !is_minority)) {
      gone.insert(member.id);
    }
  }
  return gone;
}

}  // namespace cohort::membership

#pragma once

#include <algorithm>
#include <set>
#include <string>

#include "cohort/membership/internal/observations.h"
#include "cohort/membership/record.h"

namespace cohort::membership {

/// What the agent that decides knows of each agent of the record. Ownership: refers to both.
class SeenMembers {
 public:
  SeenMembers(const RendezvousRecord& record, const Observations& seen) : old_(record), seen_(seen) {}

  /// Null: it has not reported.
  const AgentView* view(const MemberInfo& member) const { return seen_.find(member.incarnation); }
  Time last_heard(const MemberInfo& member) const {
    const AgentView* const known = view(member);
    return known == nullptr ? seen_.since : std::max(known->last_heard, seen_.since);
  }
  bool is_self(const MemberInfo& member) const { return member.incarnation == seen_.self; }
  bool is_silent(const MemberInfo& member, int factor) const {
    return !is_self(member) && seen_.now - last_heard(member) > factor * old_.settings.silence;
  }
  bool is_dead(const MemberInfo& member) const {
    const AgentView* const known = view(member);
    return known != nullptr && known->is_dead;
  }
  /// What a member says of the generation that it is in now.
  const Report* report_of_generation(const MemberInfo& member) const {
    const AgentView* const known = view(member);
    return known == nullptr || known->report.entered != old_.generation.number ? nullptr : &known->report;
  }
  bool is_leaving(const MemberInfo& member) const {
    const AgentView* const known = view(member);
    return known != nullptr && known->report.is_leaving;
  }
  /// decide.cpp, Note [Stuck ranks]
  std::string stuck_rank(const MemberInfo& member) const {
    const AgentView* const known = view(member);
    return known == nullptr ? "" : known->report.stuck;
  }
  /// Its ranks fail again and again: a generation with it makes no step.
  const Report* hopeless_report(const MemberInfo& member) const {
    const Report* const report = report_of_generation(member);
    return report != nullptr && report->ends_run && !report->failure.empty() ? report : nullptr;
  }
  bool is_hopeless(const MemberInfo& member) const { return hopeless_report(member) != nullptr; }
  /// Its ranks can make steps, as far as it says.
  bool can_enter(const MemberInfo& member) const {
    return !is_dead(member) && !is_hopeless(member) && stuck_rank(member).empty();
  }
  /// No generation after this one is to have it.
  bool is_out(const MemberInfo& member) const {
    return is_dead(member) || is_leaving(member) || is_hopeless(member);
  }
  bool is_finished(const MemberInfo& member) const {
    const AgentView* const known = is_elastic() ? nullptr : view(member);
    const Report* const report = known != nullptr ? &known->report : report_of_generation(member);
    return report != nullptr && report->is_finished;
  }
  bool is_elastic() const { return old_.settings.virtual_ranks > 0; }
  /// decide.cpp, Note [Who is gone]
  std::set<MemberId> gone_members() const;

 private:
  const RendezvousRecord& old_;
  const Observations& seen_;
};

}  // namespace cohort::membership

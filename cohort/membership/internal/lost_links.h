#pragma once

#include <cstdint>
#include <optional>
#include <set>

#include "cohort/membership/internal/observations.h"
#include "cohort/membership/record.h"

namespace cohort::membership {

/// Ranks do not reach each other, though their agents are heard.
struct LostLink {
  const MemberInfo* first = nullptr;   ///< whose rank says so
  const MemberInfo* second = nullptr;  ///< the same member, where both ranks are its own
  bool is_repeated = false;  ///< a link was lost in the generation before too, and no step was made since

  bool is_within() const { return first == second; }
};

/// A link for which another generation must be made; nothing where there is none yet. `newest_steps`: that
/// are committed. One of two members comes before one within a member. Ownership: refers to the record.
std::optional<LostLink> find_lost_link(const RendezvousRecord& record, const Observations& seen,
                                       const std::set<MemberId>& gone, std::uint64_t newest_steps);

/// Which of the two members of a repeated loss is no member of the next generation: the one whose ranks hang,
/// as far as can be seen.
MemberId member_to_drop(const RendezvousRecord& record, const Observations& seen, const LostLink& lost);

}  // namespace cohort::membership

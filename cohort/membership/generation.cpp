#include "cohort/membership/generation.h"

#include <algorithm>

#include "cohort/base/error.h"

namespace cohort::membership {

int Generation::num_processes() const {
  int sum = 0;
  for (const MemberInfo& member : members) sum += member.num_processes;
  return sum;
}

const MemberInfo* Generation::find(MemberId id) const {
  const auto found =
      std::find_if(members.begin(), members.end(), [&](const MemberInfo& member) { return member.id == id; });
  return found == members.end() ? nullptr : &*found;
}

int Generation::first_process(MemberId id) const {
  int process = 0;
  for (const MemberInfo& member : members) {
    if (member.id == id) return process;
    process += member.num_processes;
  }
  throw UsageError("membership.generation",
                   base::concat("agent ", id, " is no member of generation ", number));
}

Generation Generation::for_ranks(std::uint64_t known_steps) const {
  Generation generation = *this;
  generation.committed_steps = std::max(committed_steps, known_steps);
  return generation;
}

VirtualBlock Generation::block(int process) const {
  const std::int64_t count = virtual_ranks, size = std::max(num_processes(), 1);
  return {static_cast<int>(process * count / size), static_cast<int>((process + 1) * count / size)};
}

}  // namespace cohort::membership

#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/comm/internal/group_state.h"
#include "cohort/comm/internal/signature.h"

/// Comparing what ranks call before the backend sees it. Internal.
namespace cohort::comm {

/// What each rank tells the others of its call: of one size, so that it can be gathered when nothing else is
/// known to fit.
struct Fingerprint {
  std::uint64_t hash = 0;  ///< of all that must be equal
  /// Sums over what goes from rank to rank; over all ranks they are equal.
  std::uint64_t sends = 0, receives = 0;
  std::int64_t steps = 0;
  std::array<char, 224> text{};  ///< ends with 0
};
static_assert(sizeof(Fingerprint) == 256);

Fingerprint make_fingerprint(const GroupState& group, const Signature& signature, const CallDetails& details);

/// Gathers the fingerprints of all ranks, where the backend takes CPU tensors over it, else over the store.
std::vector<Fingerprint> gather_over_backend(GroupState& group, const Fingerprint& fingerprint,
                                             base::Deadline deadline);
std::vector<Fingerprint> gather_over_store(GroupState& group, const Fingerprint& fingerprint,
                                           base::Deadline deadline);

/// By one of the two. Throws: what the backend or the store throws, as when a rank does not come.
std::vector<Fingerprint> gather_fingerprints(GroupState& group, const Fingerprint& fingerprint,
                                             base::Deadline deadline);

/// Throws: UsageError that lists what each rank called where that differs; the same on every rank.
void compare_calls(const GroupState& group, const std::vector<Fingerprint>& all);

}  // namespace cohort::comm

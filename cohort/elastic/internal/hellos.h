#pragma once

#include <cstdint>
#include <map>

#include "cohort/elastic/internal/wire.h"
#include "cohort/membership/generation_change.h"

/// What the processes of a generation have said when they entered it. Internal to this module.
namespace cohort::elastic {

// In Wire::value of a hello: the state is whole, and it is one of this run.
inline constexpr std::uint64_t kIsWhole = 1, kIsOfRun = 2;

/// Which processes have the state that they say. One that is new to the run may have that of another run,
/// with more steps: where there are others it has a say only if it has their bits. Where all are new, those
/// count that have the bits of the first one.
membership::Recovery recovery_of(const membership::Generation& generation, const std::map<int, Wire>& hellos);

/// The first one that is in the run; where all are new, the first one.
int process_to_compute_as(const std::map<int, Wire>& hellos);

}  // namespace cohort::elastic

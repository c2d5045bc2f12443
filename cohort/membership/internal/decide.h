#pragma once

#include <optional>

#include "cohort/membership/internal/observations.h"
#include "cohort/membership/record.h"

namespace cohort::membership {

/// The record that follows, or nothing where the record stays. A pure function: two agents that see alike
/// decide alike, and a compare-and-swap sorts out those that do not.
std::optional<RendezvousRecord> decide(const RendezvousRecord& record, const Observations& seen);

/// The first record of a run, in which nobody is.
RendezvousRecord first_record(const RunSettings& settings);

}  // namespace cohort::membership

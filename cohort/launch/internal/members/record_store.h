#pragma once

#include <memory>

#include "cohort/launch/run_options.h"
#include "cohort/membership/record_store.h"

namespace cohort::launch {

/// Makes the store that has the run's record, for a backend that all agents reach by themselves; null for the
/// embedded one, whose record is in the agent at the endpoint. Not for users of the library. Throws:
/// UsageError where this build lacks the backend, or for options of it that cannot be.
std::shared_ptr<membership::RecordStore> make_record_store(const RunOptions& options);

}  // namespace cohort::launch

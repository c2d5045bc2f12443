#pragma once

#include "cohort/launch/internal/flags/flag_values.h"
#include "cohort/launch/run_options.h"

/// The flags that say how nodes find each other. No LibTorch. Not for users of the library.
namespace cohort::launch {

/// Reads --nnodes, --rdzv-..., --master-..., the secret, and what belongs to elastic runs.
/// Throws: UsageError naming the flag, its value and what is expected.
void read_rendezvous(const FlagValues& flags, RunOptions& options);

/// What they mean together. Throws: UsageError.
void check_rendezvous(const RunOptions& options);

}  // namespace cohort::launch

#pragma once

#include "cohort/config/types.h"

/// What a configuration asks of the parts that it names, and that only their registries know.
namespace cohort::train {

/// Checks that the runner, the gradient sync and the communication hook go with train.script, and with
/// distributed.virtual_ranks and distributed.elastic. run_training() and the others that take a whole
/// Config call it; a program may call it before it starts ranks.
/// Throws: ConfigError that names both keys; UsageError for a name that is asked for, and that no registry
/// has.
void check_parts(const config::Config& config);

}  // namespace cohort::train

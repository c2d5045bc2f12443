#pragma once

#include "cohort/script/internal/ir/trace.h"
#include "cohort/script/internal/record/guard.h"

namespace cohort::script {

/// A recording of a program file without backward, and the modes it was made under.
struct LoadedRecording {
  Environment environment;  ///< the modes
  Trace trace;              ///< has no backward
};

}  // namespace cohort::script

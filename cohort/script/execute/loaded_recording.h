#pragma once

#include "cohort/script/ir/trace.h"
#include "cohort/script/record/guard.h"

namespace cohort::script {

/// A recording of a program file without backward, and the modes it was made under.
struct LoadedRecording {
  Environment environment;  ///< the modes
  Trace trace;              ///< has no backward
};

}  // namespace cohort::script

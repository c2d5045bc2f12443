#pragma once

#include "cohort/base/files/fd.h"

namespace cohort::base {

/// Memory that has a descriptor (memfd_create(2)), empty, closed by exec, open to seals, and said to hold no
/// program. Not open where the system has none: errno says why.
Fd make_memory_file(const char* name);

}  // namespace cohort::base

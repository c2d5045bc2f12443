#pragma once

#include <string_view>

#include "cohort/base/files/fd.h"

namespace cohort::launch {

using base::Fd;

/// The two ends of a pipe between this process and another.
struct Pipe {
  Fd read;  ///< does not wait
  Fd write;
};

/// Returns a pipe that programs which are started do not inherit. Throws: SystemError.
Pipe make_pipe();

/// Writes all of `text`; gives up silently when nobody reads any more.
void write_all(int fd, std::string_view text);

}  // namespace cohort::launch

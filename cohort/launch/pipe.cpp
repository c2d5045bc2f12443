#include "cohort/launch/pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "cohort/base/error.h"

namespace cohort::launch {

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw SystemError("launch.pipe", base::concat("cannot make a pipe: ", std::strerror(errno)));
  }
  Pipe pipe{Fd(ends[0]), Fd(ends[1])};
  // The reader polls many pipes and must not wait in one. The writer is a program that expects to wait.
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return pipe;
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    // A log that cannot be written, as on a full disk, must not end the job.
    if (count <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
}

}  // namespace cohort::launch

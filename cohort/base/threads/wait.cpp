#include "cohort/base/threads/wait.h"

#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <thread>

namespace cohort::base {

void sleep(Deadline::Clock::duration time, Deadline deadline) {
  std::this_thread::sleep_for(std::min(time, deadline.remaining()));
}

int wait_for_files(std::span<pollfd> files, Deadline deadline) {
  return std::max(0, ::poll(files.data(), files.size(), deadline.is_never() ? -1 : deadline.remaining_ms()));
}

short ready_events(int fd, short events) {
  pollfd file{fd, events, 0};
  return ::poll(&file, 1, 0) > 0 ? file.revents : static_cast<short>(0);
}

bool wait_for_process(pid_t child, int& status, Deadline deadline) {
  pid_t found = 0;
  poll_until(
      [&] {
        found = ::waitpid(child, &status, WNOHANG);
        return found == child || (found < 0 && errno != EINTR);
      },
      deadline);
  return found == child;
}

}  // namespace cohort::base

#pragma once

#include <poll.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <span>

#include "cohort/base/threads/deadline.h"

/// All waiting of Cohort, each kind once. Every wait has a deadline, and its caller throws the error that
/// says who is missing. scripts/lint rejects waits made in another way.
namespace cohort::base {

/// Waits until `condition()` holds, and returns whether it does: false when the deadline passed first. `lock`
/// is given back meanwhile. Who makes the condition hold does so under the same mutex and notifies `changed`.
template <typename Condition>
bool wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Condition condition,
          Deadline deadline) {
  if (!deadline.is_never()) return changed.wait_until(lock, deadline.end(), condition);
  changed.wait(lock, condition);
  return true;
}

/// A thread waits for its next task. It has no deadline since nobody waits for it: who owns the thread makes
/// the condition hold in order to end it.
template <typename Condition>
void wait_for_task(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                   Condition condition) {
  changed.wait(lock, condition);
}

/// Sleeps for `time`, or until the deadline where that comes first.
void sleep(Deadline::Clock::duration time, Deadline deadline);

/// Asks `condition()` again and again, with a pause of 1 ms that grows to `most_pause`: for what notifies
/// nobody. Returns whether it holds; it is asked once more when the deadline has passed.
template <typename Condition>
bool poll_until(Condition condition, Deadline deadline,
                std::chrono::milliseconds most_pause = std::chrono::milliseconds(10)) {
  for (std::chrono::milliseconds pause(1);; pause = std::min(pause * 2, most_pause)) {
    const bool last = deadline.expired();
    if (condition()) return true;
    if (last) return false;
    sleep(pause, deadline);
  }
}

/// Waits until one of `files` is ready, and returns how many are: poll(2), which writes to `revents`. 0 when
/// the deadline passed, or a signal was handled, first.
int wait_for_files(std::span<pollfd> files, Deadline deadline);

/// Which of `events` (POLLIN, POLLOUT, ...) hold for a file now, with POLLHUP and POLLERR. Does not wait.
short ready_events(int fd, short events);

/// Waits until a child process has ended, and takes its end away (waitpid(2)); false when the deadline passed
/// first, or it is no child. `status` gets what waitpid tells of it.
bool wait_for_process(pid_t child, int& status, Deadline deadline);

}  // namespace cohort::base

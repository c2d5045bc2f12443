#pragma once

#include <sys/types.h>

#include <string>

#include "cohort/launch/pipe.h"

namespace cohort::launch {

/// A small process that outlives this one by a moment: when this one dies, by SIGKILL too, it kills the
/// process groups of the ranks. The kernel kills a rank itself then (PR_SET_PDEATHSIG), but not what the rank
/// has started. What has left its rank's group (setsid) is on its own. Make it before threads and sockets
/// that it must not hold. Threads: one caller at a time.
class OrphanWatchdog {
 public:
  /// `folder` is removed too, when this process dies before the object goes. Throws: SystemError.
  explicit OrphanWatchdog(const std::string& folder = "");
  ~OrphanWatchdog();
  OrphanWatchdog(const OrphanWatchdog&) = delete;
  OrphanWatchdog& operator=(const OrphanWatchdog&) = delete;

  pid_t pid() const { return pid_; }
  /// Takes away the end of the watchdog where somebody has killed it. From then on it guards nothing.
  void reap();
  /// Both may be called in a child between fork and exec.
  void watch(pid_t group) { send(group); }
  void forget(pid_t group) { send(-group); }

 private:
  void send(pid_t group);

  Pipe pipe_;
  pid_t pid_ = -1;
};

}  // namespace cohort::launch

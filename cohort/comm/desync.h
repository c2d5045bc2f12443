#pragma once

#include <csignal>
#include <memory>
#include <string>

#include "cohort/comm/group.h"

/// Who waits for whom, when a job hangs.
///
///     auto group = comm::init_process_group();
///     auto watch = comm::watch_for_desync(group);   // kill -USR2 PID writes what that rank is doing
namespace cohort::comm {

/// Returns what the groups of this process were last asked to do: number, collective, shapes, since when it
/// waits, and from where it was called.
std::string report();

/// While it lives, this rank answers the others and logs:
/// on `signal` its own report, on rank 0 also a table of all ranks; when a call of a group that descends from
/// the watched one fails, within about 2 s one table of all ranks, on the first rank that fails: what each
/// called last, who is behind, who called something else, who did not answer. The error does not wait for it.
/// Threads: two of its own; the store is asked over a connection of its own, four times a second.
class DesyncWatch {
 public:
  class Watcher;
  explicit DesyncWatch(std::shared_ptr<Watcher> watcher);
  /// Ends its threads: within 3.5 s if the store is silent, 4.5 s with 5,120 ranks; 3 s more while a report
  /// is written that nobody reads. Where the store is kept by this job, rank 0 stays up to a second for the
  /// others to leave.
  ~DesyncWatch();
  DesyncWatch(DesyncWatch&&) noexcept;
  DesyncWatch& operator=(DesyncWatch&&) noexcept;

 private:
  std::shared_ptr<Watcher> watcher_;
};

/// Begins to watch `job`, the group of all ranks. `signal`: 0 for none. Every rank of the job should.
/// Throws: UsageError when another watch of this process has a signal, or `job` is watched already.
[[nodiscard]] DesyncWatch watch_for_desync(const Group& job, int signal = SIGUSR2);

}  // namespace cohort::comm

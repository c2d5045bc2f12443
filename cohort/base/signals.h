#pragma once

#include <chrono>

/// Signals that a training loop looks at between steps.
namespace cohort::base {

/// The same signal again within this time is the same request: a batch system and a launcher may both deliver
/// what one person asked for once.
constexpr std::chrono::milliseconds kSameSignalTime(100);

/// While it lives, the first SIGINT, SIGTERM or SIGHUP asks to stop and a second one ends the process at once
/// with status 128 + N (the same signal again within kSameSignalTime is still the first); SIGUSR1 asks to
/// save. A SIGHUP that is ignored (nohup) stays ignored. Writing to a pipe that nobody reads any more, such
/// as that to a `tee` that Ctrl-C has ended, is an error and no longer ends the process (SIGPIPE). Handlers
/// that were there before are restored. Threads: one instance per process; the queries from any thread.
class TrainingSignals {
 public:
  /// Throws: UsageError when another instance lives.
  TrainingSignals();
  ~TrainingSignals();
  TrainingSignals(const TrainingSignals&) = delete;
  TrainingSignals& operator=(const TrainingSignals&) = delete;

  /// The signal that asked to stop, or 0.
  int stop_signal() const;
  /// True once for each time that saving was asked for since the last call.
  bool take_save_request();
};

}  // namespace cohort::base

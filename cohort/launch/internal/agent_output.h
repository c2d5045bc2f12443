#pragma once

#include <functional>
#include <string>

#include "cohort/base/log.h"
#include "cohort/launch/internal/failure.h"
#include "cohort/launch/internal/output.h"

namespace cohort::launch {

/// What an agent prints: the lines of its ranks, its own log, and the report of an attempt.
///
/// Always: log() never waits for who reads stdout or stderr, so a terminal that hangs delays no end of ranks.
/// report() waits 1 s at most, flush() until its deadline. Both are called when no rank runs.
/// Threads: one caller, the loop of the agent. Not for users of the library.
class AgentOutput {
 public:
  /// Where the lines of ranks go.
  Display& display() { return display_; }
  /// What the agent's loop waits for, and pumps.
  Console& console() { return display_.console; }

  /// Logs a line. If stderr cannot take it at once, the console keeps it and writes it later.
  void log(base::LogLevel level, const std::string& text);
  /// Logs what came of an attempt: its failures, whether ranks are started again, and the signal that ended
  /// it.
  void report(const AttemptReport& result, int world_size, int attempt, int max_restarts);
  /// Writes all that waits; gives up at the deadline, or when `stop` says so.
  void flush(base::Deadline deadline, const std::function<bool()>& stop = {}) {
    display_.console.flush(deadline, stop);
  }

 private:
  Display display_;
};

}  // namespace cohort::launch
